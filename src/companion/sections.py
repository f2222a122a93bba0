"""The sections of the book that the companion covers: the one table of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One section and where it is worked out.

    Attributes:
        number: what a reader types, "4.5.1".
        title: in the book's terms.
        equations: the numbers that the book's support page ties to a formula, "" where none.
        notebook: file name in `notebooks/`.
        trainer: TRL's class for the method.
        ready: False while the notebook is still to come.
    """

    number: str
    title: str
    equations: str
    notebook: str
    trainer: str
    ready: bool = False


SECTIONS = (
    Section("2.3.5.2", "方策勾配から PPO のクリッピングまで", "(2.29)",
            "2.3.5.2-ppo-clip.ipynb", "PPOTrainer", ready=True),
    Section("4.4.2", "RLHF：報酬モデルの学習", "(4.8)",
            "4.4.2-reward-model.ipynb", "RewardTrainer", ready=True),
    Section("4.4.3", "RLHF：PPO", "(4.9)、(4.10)",
            "4.4.3-ppo-rlhf.ipynb", "PPOTrainer", ready=True),
    Section("4.5.1", "DPO", "(4.19)",
            "4.5.1-dpo.ipynb", "DPOTrainer", ready=True),
    Section("4.5.4.2", "IPO", "",
            "4.5.4.2-ipo.ipynb", "DPOTrainer", ready=True),
    Section("4.5.4.3", "KTO", "(4.29)〜(4.32)",
            "4.5.4.3-kto.ipynb", "KTOTrainer", ready=True),
    Section("5.3.1", "GRPO", "(5.1)、(5.4)〜(5.7)",
            "5.3.1-grpo.ipynb", "GRPOTrainer", ready=True),
    Section("5.3.2", "Dr. GRPO", "(5.10)〜(5.12)",
            "5.3.2-dr-grpo.ipynb", "GRPOTrainer", ready=True),
    Section("5.3.3", "DAPO", "(5.14)〜(5.20)",
            "5.3.3-dapo.ipynb", "GRPOTrainer", ready=True),
    Section("5.3.4", "GSPO", "(5.22)〜(5.25)",
            "5.3.4-gspo.ipynb", "GRPOTrainer", ready=True),
    Section("grpo-in-practice", "GRPO の実践", "",
            "grpo-in-practice.ipynb", "GRPOTrainer"),
)


def find(number: str) -> Section:
    """The section of that number; a ValueError lists the known ones."""
    for section in SECTIONS:
        if section.number == number:
            return section
    known = ", ".join(section.number for section in SECTIONS)
    raise ValueError(f"section {number!r} is not one of: {known}")
