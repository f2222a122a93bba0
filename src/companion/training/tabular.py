"""PPO on tabular policies of the exact world: many seeds at once, every quantity known."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from companion.exact import World, sample
from companion.losses import gae, kl_penalized_rewards, ppo_policy_loss, ppo_value_loss, whiten


def tabular_ppo(
    world: World,
    ref_logits: Float[Tensor, "seed prompt prefix token"],
    rewards: Float[Tensor, "seed prompt response"],
    beta: float,
    *,
    generator: torch.Generator,
    updates: int = 200,
    samples: int = 64,
    epochs: int = 2,
    learning_rate: float = 0.05,
    epsilon: float = 0.2,
    lam: float = 1.0,
) -> Float[Tensor, "update seed prompt response"]:
    """Maximize (4.9) by PPO from the reference policy, as TRL's PPOTrainer does it.

    Every update samples responses, makes rewards (4.10), advantages by GAE (γ = 1) and whitens
    them, and takes `epochs` steps of Adam on the policy's and the value's clipped losses. The
    seeds share nothing but the clock.

    Args:
        ref_logits: log π_ref up to a constant, one table a seed; the policy starts there.
        rewards: r(x, y) of every response.
        beta: β of the KL penalty.
        generator: what the samples come from.
        samples: responses a prompt, seed and update.
        learning_rate: at the first update; it falls linearly to 0.
        epsilon: of both clips.

    Returns:
        log π(y|x) before the first update and after each, (updates + 1, seed, prompt, response).
    """
    seeds = len(ref_logits)

    def rows(table: Tensor, y: Int[Tensor, "seed prompt n"]) -> Shaped[Tensor, "batch time"]:
        """A (seed, prompt, response, time) table at the sampled responses, one row a response."""
        return table.gather(2, y[..., None].expand(*y.shape, table.shape[-1])).flatten(0, 2)

    def values_of(table: Float[Tensor, "seed prompt prefix"]) -> Tensor:
        return torch.where(world.mask, table[..., world.prefixes], 0.0)

    theta = ref_logits.clone().requires_grad_()
    values = torch.zeros_like(ref_logits[..., 0]).requires_grad_()
    optimizer = torch.optim.Adam([theta, values], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    ref_tokens = world.token_log_probs(ref_logits)
    every_mask = world.mask.expand(*rewards.shape, -1)
    trace = [world.log_probs(ref_logits)]
    for _ in range(updates):
        with torch.no_grad():
            tokens = world.token_log_probs(theta)
            y = sample(tokens.sum(-1).exp(), samples, generator)
            old_logps, ref_logps = rows(tokens, y), rows(ref_tokens, y)
            mask = rows(every_mask, y)
            scores = rewards.gather(2, y).flatten()
            token_rewards = kl_penalized_rewards(scores, old_logps, ref_logps, mask, beta)
            old_values = rows(values_of(values), y)
            advantages, returns = gae(token_rewards, old_values, mask, lam=lam)
            parts = zip(advantages.chunk(seeds), mask.chunk(seeds), strict=True)
            advantages = torch.cat([whiten(*part) for part in parts])
        for _ in range(epochs):
            logps = rows(world.token_log_probs(theta), y)
            loss = ppo_policy_loss(logps, old_logps, advantages, mask, epsilon)
            loss = loss + ppo_value_loss(
                rows(values_of(values), y), old_values, returns, mask, epsilon
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        trace.append(world.log_probs(theta.detach()))
    return torch.stack(trace)
