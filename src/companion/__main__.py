"""Command line: python -m companion list | run SECTION | info."""

import argparse
import os
import platform
import sys
import time
import unicodedata
from pathlib import Path

from companion.sections import SECTIONS, Section, find


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 when it failed, 2 when it was asked wrongly."""
    for name, number in ("stdout", 1), ("stderr", 2):
        if getattr(sys, name) is None:  # closed, as by >&-; a kernel needs one too
            _discard(number)
            setattr(sys, name, open(number, "w", encoding="utf-8"))
        getattr(sys, name).reconfigure(errors="replace")  # a console without ✓ or 〜 still works
    try:
        try:
            options = _parser().parse_args(arguments)
            return options.command(options)
        finally:
            sys.stdout.flush()  # here, not at exit, a reader that has left is noticed
    except BrokenPipeError:  # as head does
        for stream in (sys.stdout, sys.stderr):
            _discard(stream.fileno())
        return 1
    except OSError as error:  # a file is missing, or a folder, or not writable
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n中断しました", file=sys.stderr)
        return 130


def _discard(number: int) -> None:
    """Send what is written to a file descriptor, by this process or a kernel, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.set_inheritable(number, True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m companion",
        description="『基盤モデルのための強化学習』のノートブックを調べ、実行します。",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="節の一覧を表示する", description=(
        "節、内容、ノートブック、TRL のクラスの一覧を表示します。"))
    listing.set_defaults(command=_list)

    running = commands.add_parser("run", help="節のノートブックを実行する", description=(
        "節のノートブックを初めから終わりまで実行し、結果のノートブックと HTML を "
        "build/ に書き出します。"))
    running.add_argument("section", metavar="SECTION", help="節の番号（例: 4.5.1）")
    running.add_argument("--preset", choices=("cpu", "gpu"),
                         help="実行の規模。省略すると、環境に合わせて選びます")
    running.set_defaults(command=_run)

    info = commands.add_parser("info", help="バージョンと計算環境を表示する", description=(
        "バージョン、計算に使う装置、選ばれるプリセットを表示します。"))
    info.set_defaults(command=_info)
    return parser


def _list(options: argparse.Namespace) -> int:
    rows = [("節", "内容", "式", "ノートブック", "TRL のクラス")]
    rows += [_row(section) for section in SECTIONS]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (text + " " * (widths[i] - _width(text)) for i, text in enumerate(row))
        print("  ".join(padded).rstrip())
    return 0


def _row(section: Section) -> tuple[str, ...]:
    notebook = section.notebook if section.ready else "（準備中）"
    return section.number, section.title, section.equations, notebook, section.trainer


def _width(text: str) -> int:
    """Columns that the text takes in a terminal."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _run(options: argparse.Namespace) -> int:
    try:
        section = find(options.section)
    except ValueError:
        known = "\n".join(f"  {s.number}" + ("" if s.ready else "（準備中）") for s in SECTIONS)
        print(f"{options.section} という節はありません。あるのは次の節です。\n{known}",
              file=sys.stderr)
        return 2
    if not section.ready:
        print(f"{section.number}（{section.title}）のノートブックは準備中です。", file=sys.stderr)
        return 2

    from companion import runner  # Jupyter takes a moment to import; list needs none of it

    root = runner.checkout()
    source = root / "notebooks" / section.notebook
    build = root / "build"
    build.mkdir(exist_ok=True)
    print(f"{section.number} {section.title}: {source}", flush=True)
    began = time.perf_counter()
    try:
        notebook = runner.execute(source, preset=options.preset).notebook
        failure = None
    except runner.NotebookFailure as error:
        notebook, failure = error.notebook, error
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    written = runner.write(notebook, build / section.notebook, f"{section.number} {section.title}")
    if failure:
        print(f"\n失敗しました: {failure}\nそこまでの結果は次にあります。", file=sys.stderr)
    else:
        print(f"\n完了しました（{time.perf_counter() - began:.0f} 秒）。結果は次にあります。")
    for path in written:
        print(f"  {path}", file=sys.stderr if failure else sys.stdout)
    return 1 if failure else 0


def _info(options: argparse.Namespace) -> int:
    import torch

    from companion import notebook

    try:
        here = notebook.where()
    except ValueError as error:  # COMPANION_PRESET
        print(error, file=sys.stderr)
        return 2
    print(f"Python        {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name, version in notebook.versions().items():
        if name != "Python":
            print(f"{name:<13} {version}")
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "なし"
    print(f"CUDA          {cuda}")
    print(f"この環境      {here}")
    print(f"companion     {Path(__file__).parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
