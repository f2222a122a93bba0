"""DAPO's dynamic sampling, (5.14) and (5.17): a batch only of groups that teach something."""

from collections.abc import Collection

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer

from companion.losses import degenerate_groups

# The tensors that TRL may put into a batch of text, one row a completion: the side on which rows
# are padded to one width, and with what (None: the tokenizer's padding). Advantages have no width.
PADDING = {
    "prompt_ids": ("left", None),
    "prompt_mask": ("left", 0),
    "completion_ids": ("right", None),
    "completion_mask": ("right", 0),
    "tool_mask": ("right", 1),
    "old_per_token_logps": ("right", 0),
    "ref_per_token_logps": ("right", 0),
    "sampling_per_token_logps": ("right", 0),
}


class DynamicSamplingGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose training batches hold no group that is all right or all wrong.

    Such a group has no advantage, so a batch with many of them has little gradient. Here the first
    round of a batch is TRL's own. Groups without a difference in correctness are dropped; while
    some are missing, a round of as many other prompts is generated, and whatever is too much at
    the end is cut. The batch has TRL's size; groups stay whole. Evaluation is TRL's own.

    A prompt is drawn again for the same batch only when all others were drawn, one that is kept
    already only when the data has too few others. Several processes filter and fill one batch
    together, also where a group lies across two of them.

    Logged, beside what TRL logs: `dynamic_sampling/dropped_share` (of the groups that were drawn),
    of it `.../all_right_share` and `.../all_wrong_share`, and `.../extra_rounds`, the rounds after
    the first, each with as many completions as the batch. TRL's own figures of a generation
    (`reward`, `frac_reward_zero_std`, `completions/...`, `num_tokens`) count every round before
    anything is dropped: `reward` stays the policy's reward, not that of a selection.

    Args:
        *args, **kwargs: as for `GRPOTrainer`.
        correctness: the index in `reward_funcs` of the function that tells right from wrong. It
            alone decides, whatever a length penalty or another reward adds. Answers that it does
            not score (None) are left out; a group with fewer than two scored ones is dropped. In
            the counts, a value above 0 is right.
        max_rounds: after so many rounds without a full batch, the first one counted, stop.

    Raises:
        TypeError: `train_dataset` is no `datasets.Dataset`, or a number is no whole number.
        ValueError: there is no such reward function; `max_rounds` below 1; advantages that TRL
            normalises over the whole batch, before the filter. While training: images, vLLM's
            importance ratios, or whatever else in TRL's batch is not known here.
        RuntimeError: while training, the batch is not full after `max_rounds` rounds. The message
            says how many groups were drawn, all right and all wrong.

    Source: book (5.14), (5.17); Yu et al. 2025 (arXiv:2503.14476), section 3.2. Leans on what is
        private in TRL (1.8.0 to 1.16.0): `_generate_and_score_completions`, which takes the local
        rows and returns the local batch, `_calculate_rewards`, which returns those of all
        processes, `_tokenizer`, `_metrics` and `_step`.
    """

    def __init__(self, *args, correctness: int = 0, max_rounds: int = 10, **kwargs):
        super().__init__(*args, **kwargs)
        for name, number in (("correctness", correctness), ("max_rounds", max_rounds)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be a whole number, got {number!r}")
        if not 0 <= correctness < len(self.reward_funcs):
            raise ValueError(
                f"correctness is {correctness}: must be the index of one of the "
                f"{len(self.reward_funcs)} reward_funcs"
            )
        if max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, got {max_rounds}")
        if not isinstance(self.train_dataset, Dataset):
            raise TypeError(
                "train_dataset must be a datasets.Dataset, from which more prompts can be drawn, "
                f"got {type(self.train_dataset).__name__}"
            )
        for name, over_batch in (
            ("scale_rewards", "batch"),
            ("multi_objective_aggregation", "normalize_then_sum"),
        ):
            if getattr(self, name) == over_batch:
                raise ValueError(
                    f"{name}={over_batch!r} normalises over the batch before groups are dropped: "
                    "use another"
                )
        self.correctness = correctness
        self.max_rounds = max_rounds

    def _calculate_rewards(self, *args, **kwargs) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._correct = rewards[:, self.correctness]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Tensor]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)

        group_size = self.num_generations
        rows = len(inputs) * self.accelerator.num_processes
        first = len(inputs) * self.accelerator.process_index
        local = slice(first, first + len(inputs))
        rng = np.random.default_rng([self.args.seed, self._step])  # the same on every process
        prompts = gather_object([repr(row["prompt"]) for row in inputs])[::group_size]
        drawn, kept, parts = [], [], []
        all_right = all_wrong = 0
        for _ in range(self.max_rounds):
            if drawn:
                indices, prompts = self._draw_prompts(rows // group_size, drawn, kept, rng)
                repeated = [i for i in indices for _ in range(group_size)][local]
                inputs = [self.train_dataset[i] for i in repeated]  # each row its own object
            batch = self._of_all_processes(super()._generate_and_score_completions(inputs))
            dropped = degenerate_groups(self._correct, group_size)
            best = self._correct.nan_to_num(nan=-torch.inf).unflatten(0, (-1, group_size)).amax(1)
            scored = ~self._correct.isnan().unflatten(0, (-1, group_size))
            judged = dropped & (scored.sum(1) >= 2)
            all_right += (judged & (best > 0)).sum().item()
            all_wrong += (judged & (best <= 0)).sum().item()
            keep = ~dropped.repeat_interleave(group_size)
            parts.append({name: tensor[keep] for name, tensor in batch.items()})
            drawn += prompts
            kept += [p for p, drop in zip(prompts, dropped.tolist(), strict=True) if not drop]
            if len(kept) * group_size >= rows:
                break
        else:
            raise RuntimeError(
                f"dynamic sampling found {len(kept)} of the {rows // group_size} groups of a batch "
                f"in max_rounds={self.max_rounds} rounds: of {len(drawn)} groups drawn {all_right} "
                f"were all right, {all_wrong} all wrong and "
                f"{len(drawn) - len(kept) - all_right - all_wrong} had fewer than two scored "
                f"answers. Take {'harder' if all_right > all_wrong else 'easier'} prompts, a "
                f"larger num_generations than {group_size}, or a larger max_rounds"
            )

        figures = {
            "dropped_share": 1 - len(kept) / len(drawn),
            "all_right_share": all_right / len(drawn),
            "all_wrong_share": all_wrong / len(drawn),
            "extra_rounds": len(parts) - 1,
        }
        for name, figure in figures.items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(figure)

        joined = {name: self._join(name, [part[name] for part in parts])[:rows] for name in batch}
        loss_mask = joined["completion_mask"] * joined.get("tool_mask", 1)
        output = {name: tensor[local] for name, tensor in joined.items()}
        # DAPO's denominator: the tokens of all processes that count in the loss
        return output | {"num_items_in_batch": loss_mask.sum()}

    def _draw_prompts(
        self, count: int, drawn: Collection[str], kept: Collection[str], rng: np.random.Generator
    ) -> tuple[list[int], list[str]]:
        """`count` rows of the data and their prompts: new ones if there are enough of them."""
        order = rng.permutation(len(self.train_dataset)).tolist()
        chosen: dict[int, str] = {}
        for avoid in (set(drawn), set(kept), None):
            for i in order:
                if len(chosen) == count:
                    break
                prompt = repr(self.train_dataset[i]["prompt"])
                if avoid is None or not (prompt in avoid or prompt in chosen.values()):
                    chosen[i] = prompt
        return list(chosen), list(chosen.values())

    def _of_all_processes(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows of all processes, in the order in which TRL scores them."""
        unknown = sorted(batch.keys() - PADDING.keys() - {"advantages", "num_items_in_batch"})
        if unknown:
            raise ValueError(f"dynamic sampling cannot join {', '.join(unknown)} of TRL's batch")
        whole = {}
        for name, tensor in batch.items():
            if name in PADDING:
                side, value = self._padding(name)
                tensor = self.accelerator.pad_across_processes(
                    tensor, dim=1, pad_index=value, pad_first=side == "left"
                )
            if name != "num_items_in_batch":
                whole[name] = self.accelerator.gather(tensor)
        return whole

    def _join(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Stack the rows of all rounds, padded to one width."""
        if name in PADDING:
            side, value = self._padding(name)
            width = max(tensor.size(1) for tensor in tensors)
            missing = [width - tensor.size(1) for tensor in tensors]
            tensors = [
                pad(tensor, (n, 0) if side == "left" else (0, n), value=value)
                for tensor, n in zip(tensors, missing, strict=True)
            ]
        return torch.cat(tensors)

    def _padding(self, name: str) -> tuple[str, int]:
        side, value = PADDING[name]
        return side, self._tokenizer.pad_token_id if value is None else value
