# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: nbgrader,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 演習 2.3.5.2 GAE と PPO のクリッピング
#
# GAE と PPO の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、同じデータで更新しつづけた方策の行き先を先に言い当ててから測ります。2.3.5.2 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | GAE と損失関数を実装する | 8 |
# | 2 | 恒等式で誤りを見つけて直す | 4 |
# | 3 | 数を予想してから測る | 5 |
# | 4 | 言葉で説明する | 3 |
#
# **進め方** 上のセルから順に実行してください。解答するのは「ここに…書いてください」とあるセルだけです。 `raise NotImplementedError` の行は消して、そこにコードを書きます。その下のテストのセルを実行すると、合っていれば ✓ が出て、違っていればどこを見直せばよいかが出ます。採点では、ここに見えているもののほかに、別の数値でのテストも行います。
#
# ## 記号
#
# | 記号 | 意味 | 変数 | 形状 |
# |---|---|---|---|
# | $r_t$ | トークン $t$ の直後の報酬 | `rewards` | (B, T) |
# | $V(s_t)$ | トークン $t$ の前の価値 | `values` | (B, T) |
# | $\gamma,\ \lambda$ | 割引率、GAE の係数 | `gamma`, `lam` | – |
# | $\widehat A_t$ | アドバンテージ | `advantages` | (B, T) |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}}$ | 行動の対数確率 | `logps`, `old_logps` | (B, T) |
# | $w_t(\theta)$ | 重要度比 $\pi_\theta/\pi_{\theta_{\mathrm{old}}}$ | – | (B, T) |
# | $\epsilon$ | クリッピングの幅 | `epsilon` | – |
#
# B は回答の数、T はいちばん長い回答のトークン数です。 `mask` （形状は (B, T)）は、回答のトークンで 1、右側の詰め物で 0 です。

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
from companion.notebook import setup

setup(seed=0)

# %% nbgrader={"grade": false, "grade_id": "imports", "locked": true, "schema_version": 3, "solution": false, "task": false}
import math
import warnings

import torch

from companion.plots import curves

warnings.simplefilter("ignore")  # 自動採点は警告の表示も誤りと数えるため

# %% nbgrader={"grade": false, "grade_id": "helpers", "locked": true, "schema_version": 3, "solution": false, "task": false}
def double(values):
    return torch.tensor(values, dtype=torch.float64)


def close(value, expected, tol=1e-6):
    return abs(value - expected) <= tol


def all_close(values, expected, tol=1e-6):
    return all(close(v, e, tol) for v, e in zip(values, expected, strict=True))


def random_rows(lengths, seed, columns):
    """形状 (B, T) の乱数を columns 個と、長さが lengths のマスク"""
    generator = torch.Generator().manual_seed(seed)
    shape = columns, len(lengths), max(lengths)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    table = torch.randn(shape, generator=generator, dtype=torch.float64)
    return *table, mask


def hint_for(values, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if all_close(values, wrong, 1e-4):
            return hint
    return otherwise


# %% [markdown]
# ## 問 1　GAE と損失関数を実装する（8 点）
#
# ### 1.1　GAE
#
# TD 誤差 $\delta_t=r_t+\gamma V(s_{t+1})-V(s_t)$ から、後ろ向きの漸化式
#
# $$
# \widehat A_t=\delta_t+\gamma\lambda\,\widehat A_{t+1}
# $$
#
# でアドバンテージを計算し、 `(advantages, returns)` を返してください。 `returns` は $\widehat A_t+V(s_t)$ です。
# 回答の最後のトークンの後では、価値もアドバンテージも 0 です。詰め物のところは、どちらも 0 を返します。詰め物に何が入っていても（NaN でも）、結果が変わってはいけません。勾配は流しません。

# %% nbgrader={"grade": false, "grade_id": "gae", "locked": false, "schema_version": 3, "solution": true, "task": false}
def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """アドバンテージと、価値の目標を返す。どちらも形状 (B, T)"""
    ### BEGIN SOLUTION
    real = mask.bool()
    rewards = torch.where(real, rewards.detach(), 0.0)
    values = torch.where(real, values.detach(), 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values
    ### END SOLUTION


# %% [markdown]
# はじめは 1 行、詰め物なし。報酬は最後に 1、価値は $(0.5,0.6,0.7)$、 $\gamma=1,\ \lambda=0.95$ です。

# %% nbgrader={"grade": true, "grade_id": "test_gae_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
r, V = double([[0.0, 0.0, 1.0]]), double([[0.5, 0.6, 0.7]])
result = gae(r, V, torch.ones(1, 3), 1.0, 0.95)
assert len(result) == 2, "(advantages, returns) の組を返しましょう。"
advantages, returns = result
assert advantages.shape == returns.shape == (1, 3), "形状は (B, T) です。"
hints = {
    (0.1, 0.1, 0.3): "TD 誤差だけのようです。次のアドバンテージを足します。",
    (0.5, 0.4, 0.3): "λ が掛かっていないようです。",
    (2.1675, 1.65, 1.0): "TD 誤差から V(s_t) が引かれていないようです。",
    (-0.79925, -0.315, 0.3): "TD 誤差に V(s_{t+1}) が足されていないようです。",
    (1.0975, 1.05, 1.0): "最後のトークンの後の価値は 0 です。",
    (0.1, 0.195, 0.48525): "向きが逆です。後ろから前へ計算します。",
    (0.4025, 0.35, 0.3): "TD 誤差の V(s_{t+1}) には、λ は掛かりません。",
}
hint = hint_for(advantages[0].tolist(), hints, "漸化式と見比べてみましょう。")
assert all_close(advantages[0].tolist(), (0.46575, 0.385, 0.3)), (
    f"{hint}（{advantages[0].tolist()}、正しくは 0.46575, 0.385, 0.3）")
assert all_close(returns[0].tolist(), (0.96575, 0.985, 1.0)), (
    f"returns は Â + V です。（{returns[0].tolist()}）")
print("✓ GAE の値")
### BEGIN HIDDEN TESTS
for seed, (gamma, lam) in enumerate([(1.0, 0.0), (1.0, 1.0), (0.9, 0.8), (0.5, 0.3)]):
    r, V, m = random_rows([5], seed, 2)
    A, R = gae(r, V, m, gamma, lam)
    v = V[0].tolist() + [0.0]
    delta = [r[0, t].item() + gamma * v[t + 1] - v[t] for t in range(5)]
    for t in range(5):
        expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, 5))
        assert close(A[0, t].item(), expected), f"γ = {gamma}、λ = {lam} で値が違います。"
        assert close(R[0, t].item(), expected + v[t]), f"γ = {gamma}、λ = {lam} の returns が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、長さの違う 2 行です。詰め物には、わざと大きな値を入れます。

# %% nbgrader={"grade": true, "grade_id": "test_gae_mask", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
r = double([[0.0, 0.0, 1.0, 9.0], [0.0, 2.0, 9.0, 9.0]])
V = double([[0.5, 0.6, 0.7, 2.0], [1.0, 1.5, 2.0, 2.0]]).requires_grad_()
m = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
advantages, returns = gae(r, V, m, 1.0, 0.95)
first = advantages[0].tolist()
assert all_close(first[:3], (0.46575, 0.385, 0.3)), (
    f"詰め物の価値か報酬が混ざっています。（{first[:3]}）")
assert all_close(advantages[1].tolist()[:2], (0.975, 0.5)), (
    "行ごとに終わりの位置が違います。2 行目の終わりは 2 トークン目です。")
for name, table in (("advantages", advantages), ("returns", returns)):
    assert not table[m == 0].any(), f"{name} の詰め物は 0 にしましょう。"
    assert not table.requires_grad, f"{name} に勾配が流れています。"
print("✓ 詰め物")
### BEGIN HIDDEN TESTS
lengths = [4, 1, 6, 3]
r, V, m = random_rows(lengths, 7, 2)
clean = gae(r, V, m, 0.9, 0.7)
for filler in (0.0, 50.0, math.nan):
    dirty = gae(torch.where(m, r, filler), torch.where(m, V, filler), m.int(), 0.9, 0.7)
    for ours, theirs in zip(clean, dirty, strict=True):
        assert torch.allclose(ours, theirs), "詰め物の値で結果が変わります。"
for row, n in enumerate(lengths):
    v = V[row, :n].tolist() + [0.0]
    delta = [r[row, t].item() + 0.9 * v[t + 1] - v[t] for t in range(n)]
    for t in range(n):
        expected = sum(0.63 ** (k - t) * delta[k] for k in range(t, n))
        assert close(clean[0][row, t].item(), expected), "別の長さで値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　PPO の損失
#
# 式 (2.29) の目的関数
#
# $$
# \min\Bigl\{w_t(\theta)\widehat A_t,\ \mathrm{clip}\bigl(w_t(\theta),1-\epsilon,1+\epsilon\bigr)\widehat A_t\Bigr\}
# $$
#
# を、バッチの **全トークンで平均** し、符号を反転したものを返してください。詰め物は、和にもトークンの数にも入れません。詰め物に何が入っていても（NaN でも）、値も勾配も変わってはいけません。古い方策の対数確率とアドバンテージはデータとして扱い、勾配を流しません。

# %% nbgrader={"grade": false, "grade_id": "ppo_policy_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ppo_policy_loss(logps, old_logps, advantages, mask, epsilon):
    """PPO の損失（スカラー）を返す。ほかはどれも形状 (B, T)"""
    ### BEGIN SOLUTION
    real = mask.bool()
    ratio = torch.where(real, logps - old_logps.detach(), 0.0).exp()
    advantages = torch.where(real, advantages.detach(), 0.0)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -objective.sum() / real.sum()
    ### END SOLUTION


# %% [markdown]
# はじめは 1 トークンで、四つの場合を確かめます。 $\epsilon=0.2$ です。

# %% nbgrader={"grade": false, "grade_id": "four_cases", "locked": true, "schema_version": 3, "solution": false, "task": false}
def value_and_slope(loss, w, A, epsilon=0.2):
    """1 トークンの目的関数（損失の符号を反転）と、log w についての傾き"""
    logp = double([[math.log(w) - 3.0]]).requires_grad_()
    old = double([[-3.0]])
    result = -loss(logp, old, double([[A]]), torch.ones(1, 1), epsilon)
    assert result.shape == (), "損失はスカラーです。"
    slope = torch.autograd.grad(result, logp, allow_unused=True)[0]
    assert slope is not None, "方策に勾配が流れていません。"
    return result.item(), slope.item()


FOUR = {(1.5, 1.0): (1.2, 0.0), (1.5, -1.0): (-1.5, -1.5),
        (0.5, 1.0): (0.5, 0.5), (0.5, -1.0): (-0.8, 0.0)}


# %% nbgrader={"grade": true, "grade_id": "test_four_cases", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
found = [value_and_slope(ppo_policy_loss, w, A) for w, A in FOUR]
hints = {
    (1.5, -1.2, 0.8, -0.5): "min ではなく max になっているようです。",
    (1.2, -1.2, 0.5, -0.5): "A の符号で min と max を替えていませんか。いつも min です。",
    (1.5, -1.5, 0.5, -0.5): "クリッピングが効いていません。",
    (1.2, -1.2, 0.8, -0.8): "クリッピングした値だけで、min をとっていないようです。",
    (-1.2, 1.5, -0.5, 0.8): "符号が逆のようです。返すのは損失です。",
    (0.405465, -0.8, -0.693147, -0.8): "比ではなく、対数確率の差のままのようです。",
    (2 / 3, -0.8, 1.2, -2.0): "比の向きが逆のようです。新しい方策が分子です。",
}
hint = hint_for([value for value, _ in found], hints, "四つの場合の表と見比べましょう。")
for (w, A), (value, slope) in zip(FOUR, found, strict=True):
    expected = FOUR[w, A]
    assert close(value, expected[0]), (
        f"w = {w}、A = {A:+g}: {hint}（{value:.4f}、正しくは {expected[0]}）")
    assert close(slope, expected[1]), (
        f"w = {w}、A = {A:+g}: 傾きは {expected[1]} です。（{slope:.4f}）")
print("✓ 四つの場合")
### BEGIN HIDDEN TESTS
for w in (0.3, 0.85, 0.97, 1.0, 1.04, 1.15, 2.5):
    for A in (-2.0, -0.3, 0.0, 0.4, 3.0):
        for epsilon in (0.1, 0.3):
            kept = min(max(w, 1 - epsilon), 1 + epsilon)
            expected = min(w * A, kept * A)
            moves = w * A <= kept * A
            value, slope = value_and_slope(ppo_policy_loss, w, A, epsilon)
            assert close(value, expected), f"w = {w}、A = {A}、ε = {epsilon} で値が違います。"
            assert close(slope, w * A if moves else 0.0), f"w = {w}、A = {A}、ε = {epsilon} で傾きが違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、長さの違う 2 行の平均です。比はどれも 1 なので、トークンの損失は $-\widehat A_t$ です。

# %% nbgrader={"grade": true, "grade_id": "test_token_mean", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
zeros = torch.zeros(2, 3, dtype=torch.float64)
A = double([[-1.0, 7.0, 7.0], [-3.0, -3.0, -3.0]])
m = torch.tensor([[1, 0, 0], [1, 1, 1]])
value = ppo_policy_loss(zeros, zeros, A, m, 0.2).item()
hints = {
    (2.0,): "行ごとに平均してから平均しているようです。全トークンで一度に平均します。",
    (10.0,): "合計になっているようです。平均にしましょう。",
    (5.0,): "行の数で割っているようです。トークンの数で割ります。",
    (10 / 6,): "詰め物も数えて割っているようです。",
    (-4 / 6,): "詰め物の値が混ざっているようです。",
}
hint = hint_for([value], hints, "実のトークン 4 つの平均です。")
assert close(value, 2.5), f"{hint}（{value:.4f}、正しくは 2.5）"
print("✓ 全トークンの平均")
### BEGIN HIDDEN TESTS
lengths = [4, 1, 6, 3]
x, o, A, m = random_rows(lengths, 11, 3)
expected = 0.0
for i, n in enumerate(lengths):
    for t in range(n):
        w = math.exp((x - o)[i, t].item())
        a = A[i, t].item()
        expected -= min(w * a, min(max(w, 0.8), 1.2) * a) / sum(lengths)
for filler in (0.0, 30.0, math.nan):
    tables = (torch.where(m, table, filler) for table in (x, o, A))
    value = ppo_policy_loss(*tables, m.int(), 0.2)
    assert value.shape == () and close(value.item(), expected), "別の数値で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。 $\theta=\theta_{\mathrm{old}}$ では、勾配は $-\widehat A_t/$ （トークンの数）です。古い方策として同じテンソルを渡しても、打ち消されてはいけません。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
logps = double([[-1.0, -2.0], [-1.5, 9.0]]).requires_grad_()
old = logps.detach().clone().requires_grad_()
A = double([[1.0, -2.0], [3.0, 9.0]]).requires_grad_()
m = torch.tensor([[1, 1], [1, 0]])
ppo_policy_loss(logps, old, A, m, 0.2).backward()
assert logps.grad is not None, "方策に勾配が流れていません。"
for data, name in ((old, "古い方策"), (A, "アドバンテージ")):
    detached = data.grad is None or not data.grad.any()
    assert detached, f"{name}に勾配が流れています。"
assert all_close(logps.grad.flatten().tolist(), (-1 / 3, 2 / 3, -1.0, 0.0)), (
    f"勾配が違います。（{logps.grad.flatten().tolist()}）")
print("✓ 勾配")
### BEGIN HIDDEN TESTS
logps = double([[-1.0, -2.0]]).requires_grad_()
ppo_policy_loss(logps, logps * 1.0, double([[1.0, -2.0]]), torch.ones(1, 2), 0.2).backward()
assert all_close(logps.grad[0].tolist(), (-0.5, 1.0)), "古い方策の勾配が、方策の勾配を打ち消しています。"
x, o, A, m = random_rows([3, 5], 13, 3)
leaf = torch.where(m, x, math.nan).requires_grad_()
ppo_policy_loss(leaf, o, A, m, 0.2).backward()
w = (x - o).exp()
stopped = (w > 1.2) & (A > 0) | (w < 0.8) & (A < 0) | ~m
expected = torch.where(stopped, 0.0, -w * A / 8)
assert torch.allclose(leaf.grad, expected), "クリッピングされた所とされない所で、勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた PPO の損失です。「 $A<0$ のときは向きが逆だから、 $\max$ にしないといけない」と考えたそうです。学習を始めると、はじめのうちは正しいものと同じように進みます。

# %% nbgrader={"grade": false, "grade_id": "buggy_policy_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_policy_loss(logps, old_logps, advantages, mask, epsilon):
    w = (logps - old_logps.detach()).exp()
    plain = w * advantages
    clipped = w.clamp(1 - epsilon, 1 + epsilon) * advantages
    objective = torch.where(
        advantages >= 0, torch.minimum(plain, clipped),
        torch.maximum(plain, clipped))
    return -(objective * mask).sum() / mask.sum()


# %% [markdown]
# 正しい損失なら、次の 3 つがいつでも成り立ちます。 $\mathcal{L}(w,A)$ は 1 トークンの損失です。
#
# 1. **出発点** 比が 1 なら、 $\mathcal{L}(1,A)=-A$ です。
# 2. **目盛り** アドバンテージを 2 倍すると、損失も 2 倍です。 $\mathcal{L}(w,2A)=2\,\mathcal{L}(w,A)$
# 3. **悲観** クリッピングしたときの損失は、しないときの損失 $-wA$ より小さくなりません。 $\max\{\mathcal{L}(w,A),-wA\}=\mathcal{L}(w,A)$

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, w, A):
    """3 つの恒等式の名前、左辺、右辺（ε = 0.2）"""
    def of(ratio, advantage):
        log_w = double([[math.log(ratio)]])
        return loss(log_w, 0 * log_w, double([[advantage]]),
                    torch.ones(1, 1), 0.2).item()

    return [
        ("1 出発点", of(1.0, A), -A),
        ("2 目盛り", of(w, 2 * A), 2 * of(w, A)),
        ("3 悲観　", max(of(w, A), -w * A), of(w, A)),
    ]


def show_identities(loss, w, A):
    for name, left, right in identities(loss, w, A):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_policy_loss, w=1.5, A=1.0)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# $w=1.5,\ A=1$ では、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_policy_loss, w=…, A=…)` を呼び、 `w` と `A` を変えてみましょう。
# 成り立たなくなる恒等式の番号を `failed_identity` に、 $w=2,\ A=-1$ のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（w = 2、A = −1 のとき）
### BEGIN SOLUTION
failed_identity = 3
left_side = identities(buggy_policy_loss, w=2.0, A=-1.0)[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
assert not close(left_side, 1.2, 0.01), "それは右辺の値です。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
assert failed_identity == 3, "破れているのは別の恒等式です。"
assert close(left_side, 2.0, 0.002), "w = 2、A = −1 で左辺を測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_policy_loss` の誤りを直したものを `repaired_policy_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_policy_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_policy_loss(logps, old_logps, advantages, mask, epsilon):
    ### BEGIN SOLUTION
    w = (logps - old_logps.detach()).exp()
    plain = w * advantages
    clipped = w.clamp(1 - epsilon, 1 + epsilon) * advantages
    objective = torch.minimum(plain, clipped)
    return -(objective * mask).sum() / mask.sum()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for w, A in ((1.5, 1.0), (2.0, -1.0), (0.5, -1.0)):
    for name, left, right in identities(repaired_policy_loss, w, A):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
x, o, A, m = random_rows([4, 2], 17, 3)
for epsilon in (0.1, 0.3):
    expected = 0.0
    for w, a, keep in zip((x - o).exp().flatten().tolist(), A.flatten().tolist(), m.flatten().tolist(), strict=True):
        if keep:
            expected -= min(w * a, min(max(w, 1 - epsilon), 1 + epsilon) * a) / 6
    value = repaired_policy_loss(x, o, A, m.double(), epsilon).item()
    assert close(value, expected), f"ε = {epsilon} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# 腕が 2 本の世界を考えます。古い方策から得たデータは、腕 A が 1 回（アドバンテージ $+1$ ）、腕 B が 1 回（アドバンテージ $-1$ ）だけです。この **同じデータ** で、PPO の損失（ $\epsilon=0.2$ ）を勾配法で、長いあいだ下げつづけます。方策は 2 つのロジットの softmax です。
#
# ### 3.1　予想する
#
# - `predicted_half` ：古い方策が $(0.5,0.5)$ のとき、A の確率は、どこで止まるでしょうか。
# - `predicted_sure` ：古い方策が $(0.9,0.1)$ のとき、A の確率は、どこへ近づくでしょうか。

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_half = A の確率（古い方策が 0.5 のとき）
# predicted_sure = A の確率（古い方策が 0.9 のとき）
### BEGIN SOLUTION
predicted_half = 0.6
predicted_sure = 1.0
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_half", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_half <= 1, "確率は 0 から 1 までの数です。"
assert predicted_half > 0.5, "A のアドバンテージは正です。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_half, 0.6, 0.015), "0.5 から始めたときの予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_sure", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_sure <= 1, "確率は 0 から 1 までの数です。"
assert predicted_sure >= 0.9, "A のアドバンテージは正です。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_sure, 1.0, 0.02), "0.9 から始めたときの予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 2 つのトークン（腕 A、腕 B）の PPO の損失を `loss` に書いてください。問 1 の `ppo_policy_loss` を使っても、式を直接書いても構いません。

# %% nbgrader={"grade": false, "grade_id": "trained_policy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trained_policy(old_probs, epsilon, advantages=(1.0, -1.0), steps=1000):
    """同じデータで PPO の損失を下げつづけた方策の確率 (2,) を返す"""
    old_logps = double(old_probs).log()
    advantages = double(advantages)
    logits = old_logps.clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=0.05)
    for _ in range(steps):
        logps = logits.log_softmax(0)
        ### BEGIN SOLUTION
        loss = ppo_policy_loss(logps[None], old_logps[None], advantages[None],
                               torch.ones(1, 2), epsilon)
        ### END SOLUTION
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return logits.softmax(0).detach()


# %% nbgrader={"grade": true, "grade_id": "test_trained_policy", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
half = trained_policy((0.5, 0.5), epsilon=0.2)
sure = trained_policy((0.9, 0.1), epsilon=0.2)
assert half.shape == (2,), "2 本の腕の確率を返してください。"
assert close(half.sum().item(), 1), "確率の和が 1 になりません。"
assert half[0] > 0.55 and sure[0] > 0.9, "A の確率が増えていません。"
assert half[0] < 0.9, "止まるはずのところで止まっていません。"
print("✓ 学習できました")
### BEGIN HIDDEN TESTS
assert close(half[0].item(), 0.6, 0.02), "0.5 から始めたときの行き先が違います。"
assert sure[0] > 0.97, "0.9 から始めたときの行き先が違います。"
# A は (1 + ε)π_old で、B は (1 − ε)π_old で押されなくなる: 後まで押すほうで止まる
for start, epsilon in ((0.5, 0.1), (0.3, 0.2), (0.6, 0.3)):
    stop = max(start * (1 + epsilon), 1 - (1 - start) * (1 - epsilon))
    reached = trained_policy((start, 1 - start), epsilon)[0].item()
    assert close(reached, stop, 0.02), f"π_old = {start}、ε = {epsilon} で行き先が違います。"
down = trained_policy((0.5, 0.5), 0.2, advantages=(-1.0, -0.0))[0].item()
assert close(down, 0.4, 0.02), "悪い腕だけのデータで行き先が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
print(f"0.5 から   予想 {predicted_half:.4f}   測定 {half[0].item():.4f}")
print(f"0.9 から   予想 {predicted_sure:.4f}   測定 {sure[0].item():.4f}")
print(f"0.9 から始めたときの比 w は、最大でも {1 / 0.9:.3f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 次は、8 本の腕を一様な方策で 40 回引き、その同じデータで 150 回更新した結果です。真の報酬の期待値は腕ごとに少しずつ違いますが、1 回ごとの報酬には大きな雑音があります。「代理」は、データで測った $\frac1n\sum_t(w_t-1)\widehat A_t$ 、「本当」は、報酬の期待値の伸びを正確に計算したものです。乱数によっては、クリッピングなしでも本当の値が伸びることがありますが、ここでは、そうならなかった例を一つ選びました。左右の図で、縦軸の目盛りが違うことに注意してください。

# %% nbgrader={"grade": false, "grade_id": "same_data", "locked": true, "schema_version": 3, "solution": false, "task": false}
generator = torch.Generator().manual_seed(6)
means = torch.linspace(-0.5, 0.5, 8)
arms = torch.randint(8, (40,), generator=generator)
pulled = means[arms] + 2 * torch.randn(40, generator=generator)
A = pulled - pulled.mean()
history = {}
for name, epsilon in (("なし", 1e9), ("あり", 0.2)):
    logits = torch.zeros(8, requires_grad=True)
    history[f"代理、{name}"], history[f"本当、{name}"] = [], []
    for _ in range(150):
        w = 8 * logits.softmax(0)[arms]
        kept = w.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(w * A, kept * A).mean()
        history[f"代理、{name}"].append(((w - 1) * A).mean().item())
        true = logits.softmax(0) @ means - means.mean()
        history[f"本当、{name}"].append(true.item())
        logits.grad = None
        loss.backward()
        with torch.no_grad():
            logits -= logits.grad

# %% nbgrader={"grade": false, "grade_id": "same_data_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
curves(history, {
    "クリッピングなし": {"代理": "代理、なし", "本当": "本当、なし"},
    "クリッピングあり": {"代理": "代理、あり", "本当": "本当、あり"},
})

# %% [markdown]
# 次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - クリッピングなしで、代理が伸びつづけるのに、本当の伸びがついてこないのはなぜか
# - クリッピングは、何を、どこで止めているのか（四つの場合のうち、どれか）
# - それでもクリッピングが「信頼領域」とは言えないのはなぜか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 代理は、同じ 40 回のデータで測った値です。雑音のせいで、たまたま高い報酬の出た腕があり、その確率を上げるほど代理は増えますが、その腕の本当の期待値が高いとは限りません。クリッピングがあると、アドバンテージが正の腕では比が $1+\epsilon$ を超えたところ、負の腕では $1-\epsilon$ を下回ったところで、勾配が 0 になります。たまたま良かった腕を、それ以上は攻めなくなるのです。しかし、勾配が 0 になるだけで、比が区間の外に出ることは禁じていません。大きな一歩や、ほかの腕のロジットの動きで外に出ることがあり、外に出た比を引き戻す力もないので、方策の離れ方には保証がありません。
#
# **採点の目安** 同じデータの偶然に合わせていること（1 点）、「もう十分に動いた」二つの場合で勾配が 0 になること（1 点）、勾配を止めるだけで制約ではないこと（1 点）。
