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
# # 演習 4.4.3 RLHF の PPO
#
# 式 (4.10) の報酬と、価値の損失を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、学習の行き先を先に言い当ててから測ります。4.4.3 節を読み終えた方に向けた演習です。TRL は使いません。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 報酬と価値の損失を実装する | 8 |
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
# | $r_\phi(x,y)$ | 報酬モデルの点数 | `scores` | (B,) |
# | $\log\pi_\theta,\ \log\pi_{\mathrm{ref}}$ | トークンの対数確率 | `logps`, `ref_logps` | (B, T) |
# | – | 本当のトークンで True、詰め物で False。詰め物は右にだけあります | `mask` | (B, T) |
# | $r_t$ | トークンごとの報酬 (4.10) | – | (B, T) |
# | $V,\ V_{\mathrm{old}}$ | 価値モデルの出力、生成したときの出力 | `values`, `old_values` | (B, T) |
# | $R_t$ | 価値の目標 $\widehat A_t+V_{\mathrm{old}}(s_t)$ | `returns` | (B, T) |
# | $\beta,\ \epsilon$ | KL ペナルティの係数、クリッピングの幅 | `beta`, `epsilon` | – |

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
from companion.notebook import setup

setup(seed=0)

# %% nbgrader={"grade": false, "grade_id": "imports", "locked": true, "schema_version": 3, "solution": false, "task": false}
import math
import warnings

import torch

from companion.plots import curves

warnings.simplefilter("ignore")  # 自動採点は警告の表示も誤りと数えるため


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def close(value, expected, tol=1e-6):
    return abs(value - expected) <= tol


def random_batch(lengths, width, seed):
    """点数 (B,)、対数確率 2 つ (B, 幅)、マスク。詰め物には大きな数が入っている"""
    g = torch.Generator().manual_seed(seed)
    tables = -4 * torch.rand(2, len(lengths), width, generator=g).double()
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    logps, ref_logps = tables
    logps, ref_logps = logps.where(mask, 50.0), ref_logps.where(mask, -30.0)
    scores = torch.randn(len(lengths), generator=g).double()
    return scores, logps, ref_logps, mask


def hint_for(value, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if close(value, wrong):
            return hint
    return otherwise


# %% [markdown]
# ## 問 1　報酬と価値の損失を実装する（8 点）
#
# ### 1.1　式 (4.10) の報酬
#
# 長さ $T$ の回答の、トークンごとの報酬です。
#
# $$
# r_t=-\beta\log\frac{\pi_\theta(y_t\mid x,y_{<t})}{\pi_{\mathrm{ref}}(y_t\mid x,y_{<t})}+
# \begin{cases}r_\phi(x,y)&(t=T)\\0&(t<T)\end{cases}
# $$
#
# 点数は、詰め物を除いた **最後の本当のトークン** に足します。詰め物のところは 0 にします。結果はデータとして使うので、勾配を流しません。

# %% nbgrader={"grade": false, "grade_id": "kl_penalized_rewards", "locked": false, "schema_version": 3, "solution": true, "task": false}
def kl_penalized_rewards(scores, logps, ref_logps, mask, beta):
    """トークンごとの報酬 (B, T) を返す"""
    ### BEGIN SOLUTION
    rewards = torch.where(mask.bool(), -beta * (logps - ref_logps), 0.0)
    last = mask.long().sum(-1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards.detach()
    ### END SOLUTION


# %% [markdown]
# はじめは、点数が 0 の回答で、罰の部分だけを見ます。 $\beta=0.5$ です。

# %% nbgrader={"grade": true, "grade_id": "test_penalty", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
logps, ref = double([[-1.0, -2.0, -3.0]]), double([[-3.0, -1.0, -3.0]])
full = torch.ones(1, 3, dtype=torch.bool)
result = kl_penalized_rewards(double([0.0]), logps, ref, full, 0.5)
assert isinstance(result, torch.Tensor), "torch のテンソルを返しましょう。"
assert result.shape == (1, 3), f"形状が {tuple(result.shape)} です。(B, T) にします。"
hints = {
    1.0: "符号が逆のようです。参照方策より出やすいトークンの報酬は、負になります。",
    -2.0: "β が掛かっていないようです。",
    0.5: "参照方策の対数確率が引かれていないようです。",
    -0.567668: "KL の別の推定量 k3 のようです。(4.10) は対数比そのものです。",
    -2.194528: "KL の別の推定量の、逆向きのようです。(4.10) は対数比そのものです。",
    -0.5: "全部のトークンの和が入っているようです。トークンごとに計算します。",
}
hint = hint_for(result[0, 0].item(), hints, "式と見比べてみましょう。")
for value, expected in zip(result[0].tolist(), (-1.0, 0.5, 0.0), strict=True):
    assert close(value, expected), f"{hint}（{value:.4f}、正しくは {expected}）"
print("✓ 罰の部分")
### BEGIN HIDDEN TESTS
for seed, beta in enumerate((0.0, 0.05, 0.5, 2.0)):
    _, logps, ref, mask = random_batch((4, 4), 4, seed)
    result = kl_penalized_rewards(torch.zeros(2).double(), logps, ref, mask, beta)
    for i in range(2):
        for t in range(4):
            expected = -beta * (logps[i, t] - ref[i, t]).item()
            assert close(result[i, t].item(), expected), f"β = {beta} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は点数です。方策と参照方策が同じなら罰は 0 で、点数だけが残ります。長さは 3 と 2、幅は 4 です。

# %% nbgrader={"grade": true, "grade_id": "test_score", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
same = torch.full((2, 4), -1.0).double()
mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
result = kl_penalized_rewards(double([10.0, -20.0]), same, same, mask, 0.5)
hints = {
    (0, 0, 0, 10, 0, 0, 0, -20): "点数が、詰め物まで数えた最後の場所にあります。",
    (0, 0, 0, 10, 0, 0, -20, 0): "点数が、最後のトークンの一つ後ろにあります。",
    (10, 0, 0, 0, -20, 0, 0, 0): "点数が、最初のトークンにあります。",
    (10, 10, 10, 0, -20, -20, 0, 0): "点数が、すべてのトークンにあります。",
    (0, 0, 0, 0, 0, 0, 0, 0): "点数が足されていません。",
}
found = tuple(round(v) for v in result.flatten().tolist())
hint = hints.get(found, "点数は、最後の本当のトークンに一度だけ足します。")
expected = double([[0, 0, 10, 0], [0, -20, 0, 0]])
assert torch.allclose(result, expected), f"{hint}（あなたの答え {result.tolist()}）"
print("✓ 点数の場所")
### BEGIN HIDDEN TESTS
for seed, lengths in enumerate(((1, 5, 3), (5, 5, 5), (2, 1, 1))):
    scores, logps, ref, mask = random_batch(lengths, 5, 20 + seed)
    result = kl_penalized_rewards(scores, logps, ref, mask, 0.3)
    for i, T in enumerate(lengths):
        for t in range(T):
            value = -0.3 * (logps[i, t] - ref[i, t]).item() + scores[i].item() * (t == T - 1)
            assert close(result[i, t].item(), value), f"長さ {T} の回答で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 詰め物には、でたらめな数が入っていることがあります。結果に漏れてはいけません。勾配も流れません。

# %% nbgrader={"grade": true, "grade_id": "test_mask", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
scores, logps, ref, mask = random_batch((2, 3), 4, seed=5)
logps = logps.masked_fill(~mask, -70.0).requires_grad_()
result = kl_penalized_rewards(scores, logps, ref, mask, 0.5)
assert not result.requires_grad, "報酬に勾配が流れています。データとして返します。"
assert not result[~mask].any(), "詰め物のところが 0 になっていません。"
other = logps.detach().masked_fill(~mask, 9.0)
again = kl_penalized_rewards(scores, other, ref, mask, 0.5)
assert torch.allclose(result, again), "詰め物の数が、報酬に漏れています。"
print("✓ 詰め物")
### BEGIN HIDDEN TESTS
for width in (3, 6):
    scores, logps, ref, mask = random_batch((1, 3, 2), width, seed=6)
    result = kl_penalized_rewards(scores, logps.requires_grad_(), ref, mask, 0.7)
    assert not result.requires_grad and not result[~mask].any(), "詰め物か勾配が漏れています。"
    sums = scores - 0.7 * ((logps - ref).detach() * mask).sum(-1)
    assert torch.allclose(result.sum(-1), sums), "回答ごとの和が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　価値の損失
#
# 価値を、前の値の $\pm\epsilon$ に押し込めた $V^{\mathrm{clip}}=\mathrm{clip}(V,\ V_{\mathrm{old}}-\epsilon,\ V_{\mathrm{old}}+\epsilon)$ を作り、2 乗誤差の **大きいほう** をとります。
#
# $$
# L_V=\frac12\cdot\frac{1}{\sum_i|y_i|}\sum_{i,t}\max\Bigl\{\bigl(V-R_t\bigr)^2,\ \bigl(V^{\mathrm{clip}}-R_t\bigr)^2\Bigr\}
# $$
#
# 平均は、ミニバッチの **本当のトークン全部** についてとります。 $V_{\mathrm{old}}$ と $R_t$ はデータとして扱います。

# %% nbgrader={"grade": false, "grade_id": "ppo_value_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ppo_value_loss(values, old_values, returns, mask, epsilon):
    """価値の損失（スカラー）を返す。テンソルはどれも形状 (B, T)"""
    ### BEGIN SOLUTION
    old_values, returns = old_values.detach(), returns.detach()
    clipped = values.clamp(old_values - epsilon, old_values + epsilon)
    squares = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    mask = mask.to(values.dtype)
    return 0.5 * (squares * mask).sum() / mask.sum()
    ### END SOLUTION


# %% [markdown]
# はじめは、1 トークンです。前の値は 0、目標は 1、 $\epsilon=0.2$ です。

# %% nbgrader={"grade": false, "grade_id": "one_token", "locked": true, "schema_version": 3, "solution": false, "task": false}
one = torch.ones(1, 1, dtype=torch.bool)


def value_loss_of(value, old=0.0, target=1.0, epsilon=0.2):
    """1 トークンの損失"""
    loss = ppo_value_loss(*double([[[value]], [[old]], [[target]]]), one, epsilon)
    assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
    assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"
    return loss.item()


# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
hints = {
    0.125: "小さいほうをとっているか、クリッピングがないようです。",
    0.64: "1/2 が掛かっていないようです。",
    0.25: "小さいほうをとり、1/2 も掛かっていないようです。",
    0.4: "2 乗になっていないようです。",
}
value = value_loss_of(0.5)
hint = hint_for(value, hints, "式と見比べてみましょう。")
assert close(value, 0.32), f"{hint}（{value:.4f}、正しくは 0.32）"
value = value_loss_of(0.1)
assert close(value, 0.405), f"範囲の中では、ただの 2 乗誤差の半分です。（{value:.4f}）"
value = value_loss_of(-0.5)
assert close(value, 1.125), f"逆へ動いたときも、大きいほうです。（{value:.4f}）"
print("✓ 1 トークンの値")
### BEGIN HIDDEN TESTS
for v, old, target, epsilon in ((0.5, 0.0, 0.3, 0.2), (-1.0, 0.4, -0.8, 0.1),
                                (2.0, 1.9, 0.0, 0.5), (0.7, -0.7, 0.1, 1.0)):
    clipped = min(max(v, old - epsilon), old + epsilon)
    expected = max((v - target) ** 2, (clipped - target) ** 2) / 2
    value = value_loss_of(v, old, target, epsilon)
    assert close(value, expected), "別の数値で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、長さが 3 と 1 の 2 つの回答です。1 つ目の誤差はどのトークンでも 0、2 つ目の誤差は 2 です。

# %% nbgrader={"grade": true, "grade_id": "test_value_batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
V = double([[0, 0, 0], [2, 90, 90]])
target = double([[0, 0, 0], [0, 7, 8]])
value = ppo_value_loss(V, V, target, mask, 0.2).item()
hints = {
    1.0: "回答ごとに平均してから平均しているようです。全トークンで平均します。",
    2.0: "合計になっているようです。平均にしましょう。",
    1 / 3: "詰め物まで数えて平均しているようです。",
    1134.75: "マスクが使われていないようです。",
}
hint = hint_for(value, hints, "全トークンで平均します。")
assert close(value, 0.5), f"{hint}（{value:.4f}、正しくは 0.5）"
print("✓ ミニバッチの平均")
### BEGIN HIDDEN TESTS
for seed, lengths in enumerate(((1, 5, 3), (4, 4, 4), (2, 1, 1))):
    _, V, old, mask = random_batch(lengths, 5, 40 + seed)
    _, target, _, _ = random_batch(lengths, 5, 60 + seed)
    total = 0.0
    for i, T in enumerate(lengths):
        for t in range(T):
            v, o, r = (x[i, t].item() for x in (V, old, target))
            clipped = min(max(v, o - 0.3), o + 0.3)
            total += max((v - r) ** 2, (clipped - r) ** 2)
    value = ppo_value_loss(V, old, target, mask, 0.3)
    assert value.shape == () and close(value.item(), total / (2 * sum(lengths))), (
        f"長さ {lengths} で値が違います。")
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。目標へ向かって $\epsilon$ より動いた値では（目標を大きく通り過ぎないかぎり）0、逆へ動いた値では誤差そのものです。

# %% nbgrader={"grade": true, "grade_id": "test_value_gradient", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
for v, expected in ((0.1, -0.9), (0.5, 0.0), (-0.5, -1.5)):
    V, old, target = (double([[x]]).requires_grad_() for x in (v, 0.0, 1.0))
    ppo_value_loss(V, old, target, one, 0.2).backward()
    assert V.grad is not None, "価値に勾配が流れていません。"
    for data, name in ((old, "前の価値"), (target, "目標")):
        flows = data.grad is not None and data.grad.any()
        assert not flows, f"{name}に勾配が流れています。"
    value = V.grad.item()
    assert close(value, expected), f"V = {v} の勾配は {expected} です。いまは {value:.4f}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
V, old, target = (double([row]).requires_grad_() for row in (
    (2.0, -1.0, 0.9), (0.0, -1.1, 0.0), (0.5, 1.0, 1.2)))
ppo_value_loss(V, old, target, torch.ones(1, 3, dtype=torch.bool), 0.3).backward()
for grad, expected in zip(V.grad[0].tolist(), (0.5, -2 / 3, 0.0), strict=True):
    assert close(grad, expected), "勾配が違います。"
assert all(x.grad is None or not x.grad.any() for x in (old, target)), (
    "データに勾配が流れています。")
V = double([[0.4]]).requires_grad_()
ppo_value_loss(V, V, V + 1, one, 0.2).backward()
assert close(V.grad.item(), -1.0), "前の価値か目標の勾配が、価値の勾配を打ち消しています。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた報酬です。「式 (4.9) のとおり、点数から $\beta\times$ KL を引いたものを最後のトークンに置き、式 (4.10) のとおり、各トークンに罰を付けた」そうです。

# %% nbgrader={"grade": false, "grade_id": "buggy_rewards", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_rewards(scores, logps, ref_logps, mask, beta):
    log_ratio = torch.where(mask.bool(), logps - ref_logps, 0.0)
    rewards = -beta * log_ratio
    objective = scores - beta * log_ratio.sum(-1)
    last = mask.long().sum(-1, keepdim=True) - 1
    return rewards.scatter_add(1, last, objective[:, None])


# %% [markdown]
# 正しい報酬なら、次の 3 つがいつでも成り立ちます（ $\gamma=1$ ）。
#
# 1. **出発点** 方策と参照方策が等しければ、報酬の和は点数です。
# 2. **道の和** 報酬の和は $r_\phi(x,y)-\beta\log\frac{\pi_\theta(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}$ です。
# 3. **点数のずらし** 点数に 3 を足すと、報酬の和は 3 だけ増えます。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(rewards_of, beta):
    """3 つの恒等式の名前、左辺、右辺（長さ 3 の回答 1 つ）"""
    scores, logps, ref, mask = random_batch((3,), 5, seed=2)

    def total(scores, logps):
        return rewards_of(scores, logps, ref, mask, beta).sum().item()

    log_ratio = ((logps - ref) * mask).sum().item()
    here = total(scores, logps)
    return [
        ("1 出発点　　", total(scores, ref), scores.item()),
        ("2 道の和　　", here, scores.item() - beta * log_ratio),
        ("3 点数のずらし", total(scores + 3, logps) - here, 3.0),
    ]


def show_identities(rewards_of, beta):
    for name, left, right in identities(rewards_of, beta):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_rewards, beta=0.0)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# $\beta=0$ では、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_rewards, beta=…)` を呼び、 `beta` を変えてみましょう。
# 成り立たなくなる恒等式の番号を `failed_identity` に、 $\beta=0.5$ のときのその左辺の値を `left_side` に入れてください。
# また、この報酬で学習すると、方策は **別の** $\beta$ の $\pi^*$ へ向かいます。 $\beta=0.5$ のつもりで学習したとき、実際の $\beta$ はいくつでしょうか。 `actual_beta` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（β = 0.5 のとき）
# actual_beta = 実際の β
### BEGIN SOLUTION
failed_identity = 2
left_side = identities(buggy_rewards, beta=0.5)[failed_identity - 1][1]
actual_beta = 1.0
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
assert actual_beta > 0 and not close(actual_beta, 0.5), "実際の β は、0.5 ではありません。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
_scores, _logps, _ref, _mask = random_batch((3,), 5, seed=2)
_left = _scores.item() - 2 * 0.5 * ((_logps - _ref) * _mask).sum().item()
assert failed_identity == 2, "破れているのは別の恒等式です。"
assert close(left_side, _left, 0.002), "β = 0.5 で左辺を測り直してみましょう。"
assert close(actual_beta, 1.0, 1e-3), "報酬の和を、式 (4.9) の中身と見比べましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_rewards` の誤りを直したものを `repaired_rewards` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_rewards", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_rewards(scores, logps, ref_logps, mask, beta):
    ### BEGIN SOLUTION
    log_ratio = torch.where(mask.bool(), logps - ref_logps, 0.0)
    last = mask.long().sum(-1, keepdim=True) - 1
    return (-beta * log_ratio).scatter_add(1, last, scores[:, None])
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for beta in (0.0, 0.5, 2.0):
    for name, left, right in identities(repaired_rewards, beta):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed, beta in ((31, 0.1), (32, 0.9)):
    scores, logps, ref, mask = random_batch((4, 1, 2), 5, seed)
    result = repaired_rewards(scores, logps, ref, mask, beta)
    for i, T in enumerate((4, 1, 2)):
        for t in range(T):
            value = -beta * (logps[i, t] - ref[i, t]).item() + scores[i].item() * (t == T - 1)
            assert close(result[i, t].item(), value), (
                "罰はトークンごとに、点数は最後のトークンに置きます。")
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# プロンプトは 1 つ、回答は A、B、C の 3 つ（どれも 1 トークン）だけという小さな世界を考えます。
#
# - 参照方策は $(0.6,\ 0.3,\ 0.1)$ です。
# - 点数は $(0,\ 1,\ 2)$ です。
# - $\beta=1$ です。
#
# 式 (4.9) を勾配法で最大にします。
#
# ### 3.1　予想する
#
# - `predicted_prob` ： 最後に、C の確率はいくつになるでしょうか。
# - `predicted_gain` ： 式 (4.9) の値 $J$ は、参照方策から出発して、いくつ増えるでしょうか（ $J(\pi^*)-J(\pi_{\mathrm{ref}})$ ）。

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_prob = C の確率
# predicted_gain = J の増える量
### BEGIN SOLUTION
Z = 0.6 + 0.3 * math.exp(1) + 0.1 * math.exp(2)
predicted_prob = 0.1 * math.exp(2) / Z
predicted_gain = math.log(Z) - (0.3 * 1 + 0.1 * 2)
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_prob", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_prob <= 1, "確率は 0 から 1 までの数です。"
assert not close(predicted_prob, 0.6652, 0.003), "参照方策を忘れていませんか。"
assert not close(predicted_prob, 1.0, 0.01), "KL の罰が、A と B を残します。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_prob, 0.3430, 0.003), "C の確率の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_gain", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert predicted_gain > 0, "参照方策が最大でないかぎり、J は増えます。"
assert not close(predicted_gain, 0.7675, 0.003), "それは J(π*) です。出発点の J を引きます。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_gain, 0.2675, 0.003), "J の増える量の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 式 (4.9) の値を `objective` に書いてください。期待値は、3 つの回答についての和として、そのまま書けます。

# %% nbgrader={"grade": false, "grade_id": "trained_policy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trained_policy(scores, ref_probs, beta, steps=400):
    """式 (4.9) を勾配法で上げた方策の確率 (K,) と、J の増えた量を返す"""
    scores, ref_logps = double(scores), double(ref_probs).log()
    logits = ref_logps.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    history = []
    for _ in range(steps):
        logps = logits.log_softmax(0)
        ### BEGIN SOLUTION
        objective = (logps.exp() * (scores - beta * (logps - ref_logps))).sum()
        ### END SOLUTION
        optimizer.zero_grad()
        (-objective).backward()
        optimizer.step()
        history.append(objective.item())
    return logits.softmax(0).detach(), history[-1] - history[0]


# %% nbgrader={"grade": true, "grade_id": "test_trained_policy", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
SCORES, REF = (0.0, 1.0, 2.0), (0.6, 0.3, 0.1)
measured, gain = trained_policy(SCORES, REF, beta=1.0)
assert measured.shape == (3,), "3 つの回答の確率を返してください。"
assert close(measured.sum().item(), 1), "確率の和が 1 になりません。"
assert measured[2] > 0.2, "C の確率が増えていません。"
assert measured[0] > 0.1, "A がなくなりました。KL の罰が効いていません。"
assert gain > 0, "J が増えていません。"
print("✓ 学習できました")
### BEGIN HIDDEN TESTS
for scores, ref, beta in (((0.0, 1.0, 2.0), (0.6, 0.3, 0.1), 1.0),
                          ((5.0, 6.0, 7.0), (0.6, 0.3, 0.1), 1.0),
                          ((1.0, -1.0, 0.5, 0.0), (0.1, 0.4, 0.2, 0.3), 0.5)):
    weights = [p * math.exp(r / beta) for p, r in zip(ref, scores, strict=True)]
    _found, _gain = trained_policy(scores, ref, beta)
    for value, weight in zip(_found.tolist(), weights, strict=True):
        assert close(value, weight / sum(weights), 0.01), f"β = {beta} で行き先が違います。"
    start = sum(p * r for p, r in zip(ref, scores, strict=True))
    assert close(_gain, beta * math.log(sum(weights)) - start, 0.01), "J の増えた量が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。
# 最後の行は、3 つの点数に 5 を足したときの測定です。何が変わり、何が変わらないでしょうか。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
c = measured[2].item()
print(f"C の確率     予想 {predicted_prob:.4f}   測定 {c:.4f}")
print(f"J の増える量 予想 {predicted_gain:.4f}   測定 {gain:.4f}")
shifted, gain = trained_policy((5.0, 6.0, 7.0), REF, beta=1.0)
print(f"点数 + 5 なら C の確率 {shifted[2].item():.4f}、J の増える量 {gain:.4f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 次は、報酬モデルが 1 か所だけ間違えている世界です。回答は 4 つで、D は参照方策がほとんど書かない回答です。報酬モデルは、D の点数をとても高く付けています。 $\beta$ を変えて、式 (4.9) の最大点を計算します。

# %% nbgrader={"grade": false, "grade_id": "hacking", "locked": true, "schema_version": 3, "solution": false, "task": false}
ref_probs = double([0.5, 0.3, 0.198, 0.002])  # A、B、C、D
true_reward = double([0.0, 1.0, 2.0, -3.0])
proxy = double([0.0, 1.0, 2.0, 4.0])  # 報酬モデルの点数
history = {"逆数": [], "点数": [], "真の報酬": [], "KL": []}
for inverse in torch.linspace(0.0, 4.0, 41).tolist():  # 1/β
    best = ref_probs * (inverse * proxy).exp()
    best = best / best.sum()
    history["逆数"].append(inverse)
    history["点数"].append((best * proxy).sum().item())
    history["真の報酬"].append((best * true_reward).sum().item())
    history["KL"].append((best * (best / ref_probs).log()).sum().item())

# %% nbgrader={"grade": false, "grade_id": "hacking_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
curves(history, {"点数": "点数", "真の報酬": "真の報酬", "KL（nat）": "KL"},
       x="逆数", xlabel="1/β（右ほど β が小さい）")

# %% [markdown]
# 次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - $\beta$ を小さくすると点数は上がりつづけるのに、真の報酬が途中から下がるのはなぜか
# - $\beta$ が大きいうちは D が選ばれないのはなぜか（ $\pi^*$ の式を使って）
# - 自分の学習で真の報酬が見えないとき、何を見れば気づけるか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 式 (4.9) が上げるのは報酬モデルの点数なので、 $\beta$ を小さくするほど、点数のいちばん高い D に確率が集まります。D の点数は報酬モデルの間違いで、真の報酬は低いので、D が増えると真の報酬は下がります（報酬ハッキング）。 $\pi^*\propto\pi_{\mathrm{ref}}\exp(r_\phi/\beta)$ なので、 $\beta$ が大きいうちは、参照方策の確率 0.002 が効いて、D は点数が高くても選ばれません。KL の罰は、参照方策が書かない、報酬モデルも学んでいない回答へ行くことを防いでいます。点数だけを見ていても気づけないので、参照方策との KL が大きくなりすぎていないかを見ること、書かれた回答を実際に読むこと、報酬モデルとは別の評価（人や、正解のある問題）で測ることが必要です。
#
# **採点の目安** 上げているのは点数で、報酬モデルの間違いが突かれること（1 点）、 $\pi^*$ の式で参照方策の確率が効くこと（1 点）、KL・実際の回答・別の評価のどれかを見ること（1 点）。
