"""Executable companion to the textbook 『基盤モデルのための強化学習』."""
