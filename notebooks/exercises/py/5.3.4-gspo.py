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
# # 演習 5.3.4 GSPO
#
# 系列の重要度比と GSPO の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、数を先に言い当ててから測ります。5.3.4 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 系列の重要度比と損失関数を実装する | 8 |
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
# | $\log\pi_\theta(y_{i,t}\mid x,y_{i,<t})$ | いまの方策の、トークンの対数確率 | `logps` | (B, T) |
# | $\log\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})$ | 生成時の方策の、トークンの対数確率 | `old_logps` | (B, T) |
# | – | 回答のトークンなら 1、パディングなら 0 | `mask` | (B, T) |
# | $\lvert y_i\rvert$ | 回答の長さ | `mask.sum(-1)` | (B,) |
# | $\xi_i(\theta)$ | 系列の重要度比（式 (5.22)） | – | (B,) |
# | $\widehat{A}_i$ | アドバンテージ | `advantages` | (B,) |
# | $\epsilon$ | クリップの幅 | `epsilon` | – |

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
from companion.notebook import setup

setup(seed=0)

# %% nbgrader={"grade": false, "grade_id": "imports", "locked": true, "schema_version": 3, "solution": false, "task": false}
import math
import warnings

import torch

from companion.plots import curves

warnings.simplefilter("ignore")  # 自動採点は警告の表示も誤りと数えるため


def close(value, expected, tol=1e-6):
    return abs(value - expected) <= tol


def hint_for(value, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if close(value, wrong):
            return hint
    return otherwise


# %% nbgrader={"grade": false, "grade_id": "batches", "locked": true, "schema_version": 3, "solution": false, "task": false}
def one_row(log_w, pads=0):
    """対数比が log_w の、一つの回答の logps、old_logps、mask。パディングには大きな数を置く"""
    old = [-1.0] * len(log_w) + [-3.0] * pads
    new = [o + d for o, d in zip(old, [*log_w, *[2.0] * pads], strict=True)]
    mask = [[1.0] * len(log_w) + [0.0] * pads]
    return [torch.tensor(rows, dtype=torch.float64) for rows in ([new], [old], mask)]


def random_batch(lengths, seed):
    """長さが lengths の回答の logps、old_logps、advantages、mask"""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths) + 1
    uniform = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return -4 * uniform[0], -4 * uniform[1], advantages, mask.double()


# %% [markdown]
# ## 問 1　系列の重要度比と損失関数を実装する（8 点）
#
# ### 1.1　系列の重要度比
#
# 回答ごとに、トークンの対数比を平均し、指数をとります。
#
# $$
# \xi_i(\theta)=\exp\left(\frac{1}{|y_i|}\sum_{t=1}^{|y_i|}\log\frac{\pi_\theta(y_{i,t}\mid x,y_{i,<t})}{\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})}\right)
# $$
#
# パディングの値は使いません。トークンのない回答の $\xi$ は 1 とします。生成時の方策はデータで、勾配を流しません。

# %% nbgrader={"grade": false, "grade_id": "sequence_ratio", "locked": false, "schema_version": 3, "solution": true, "task": false}
def sequence_ratio(logps, old_logps, mask):
    """トークンの対数確率 (B, T) から、系列の重要度比 ξ (B,) を返す"""
    ### BEGIN SOLUTION
    log_w = (logps - old_logps.detach()) * mask
    return (log_w.sum(-1) / mask.sum(-1).clamp(min=1)).exp()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_ratio", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
xi = sequence_ratio(*one_row([0.3, 0.1, -0.1], pads=2))
assert isinstance(xi, torch.Tensor), "torch のテンソルを返しましょう。"
assert xi.shape == (1,), "回答ごとに 1 つの値です。形状は (B,) です。"
hints = {
    math.exp(0.3): "比の積になっているようです。対数比の和を、長さで割ります。",
    math.exp(0.06): "パディングも含めた幅で割っているようです。割るのは |y| です。",
    math.exp(4.3 / 5): "パディングの値が入っているようです。",
    math.exp(4.3 / 3): "パディングの値が入っているようです。",
    math.exp(-0.1): "引き算の向きが逆のようです。",
    (math.exp(0.3) + math.exp(0.1) + math.exp(-0.1)) / 3: "比の平均（算術平均）です。対数比を平均してから指数をとります。",
    0.1: "指数をとっていないようです。",
    math.exp(-0.9): "生成時の方策の対数確率が引かれていないようです。",
}
hint = hint_for(xi.item(), hints, "式と見比べてみましょう。")
assert close(xi.item(), math.exp(0.1)), f"{hint}（{xi.item():.6f}、正しくは 1.105171）"
empty = sequence_ratio(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
assert close(empty.item(), 1.0), "トークンのない回答の ξ は 1 とします。"
print("✓ 系列の重要度比の値")
### BEGIN HIDDEN TESTS
for seed, lengths in enumerate([(3, 1, 5), (2, 2), (7,), (1, 0, 4)]):
    logps, old, _, mask = random_batch(lengths, seed)
    xi = sequence_ratio(logps, old, mask)
    assert xi.shape == (len(lengths),), "形状は (B,) です。"
    for i, size in enumerate(lengths):
        log_w = sum((logps[i, t] - old[i, t]).item() for t in range(size))
        assert close(xi[i].item(), math.exp(log_w / max(size, 1))), "別の数値で値が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_ratio_gradient", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
logps, old, mask = (table.requires_grad_() for table in one_row([0.3, 0.1, -0.1], pads=2))
sequence_ratio(logps, old, mask.detach()).sum().backward()
assert logps.grad is not None, "方策に勾配が流れていません。"
assert old.grad is None or not old.grad.any(), "生成時の方策に勾配が流れています。"
weight = math.exp(0.1) / 3
assert not logps.grad[0, 3:].any(), "パディングに勾配が流れています。"
for grad in logps.grad[0, :3].tolist():
    assert close(grad, weight), f"どのトークンの勾配も ξ/|y| = {weight:.6f} です。いまは {grad:.6f}"
print("✓ どのトークンも平等に扱われています")
### BEGIN HIDDEN TESTS
logps, old, _, mask = random_batch((4, 2, 6), seed=9)
logps.requires_grad_()
xi = sequence_ratio(logps, logps, mask)
assert torch.allclose(xi.detach(), torch.ones(3).double()), "方策が同じなら ξ = 1 です。"
xi.sum().backward()
expected = mask / mask.sum(-1, keepdim=True)
assert torch.allclose(logps.grad, expected), "生成時の方策の勾配が、方策の勾配を打ち消しています。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　GSPO の損失
#
# 目的関数は、回答ごとの値 $\widehat W_i=\min\{\xi_i\widehat A_i,\ \mathrm{clip}(\xi_i,1-\epsilon,1+\epsilon)\widehat A_i\}$ の、全回答の平均です。損失は、その符号を逆にしたものです。
# トークンのない回答は、 $\widehat W_i=0$ として数えます（平均の分母には入ります）。アドバンテージはデータです。

# %% nbgrader={"grade": false, "grade_id": "gspo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def gspo_loss(logps, old_logps, advantages, mask, epsilon):
    """GSPO の損失（スカラー）を返す"""
    ### BEGIN SOLUTION
    log_w = (logps - old_logps.detach()) * mask
    lengths = mask.sum(-1)
    xi = (log_w.sum(-1) / lengths.clamp(min=1)).exp()
    clipped = xi.clamp(1 - epsilon, 1 + epsilon)
    W = torch.minimum(xi * advantages.detach(), clipped * advantages.detach())
    return -torch.where(lengths > 0, W, torch.zeros_like(W)).mean()
    ### END SOLUTION


# %% [markdown]
# はじめは、対数比が 0.3、0.1、−0.1（ $\xi=e^{0.1}$ ）の、一つの回答です。アドバンテージの符号と $\epsilon$ を変えて、4 つの場合を確かめます。

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logps, old, mask = one_row([0.3, 0.1, -0.1], pads=2)
values = {}
for A, epsilon in ((2.0, 0.5), (2.0, 0.01), (-2.0, 0.5), (-2.0, 0.01)):
    loss = gspo_loss(logps, old, torch.tensor([A]).double(), mask, epsilon)
    assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
    assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"
    values[A, epsilon] = loss.item()

xi = math.exp(0.1)
hints = {
    2 * xi: "符号が逆のようです。損失は、目的関数の符号を逆にしたものです。",
    -2 * math.exp(0.3): "比の積になっているようです。",
    -2 * math.exp(0.06): "パディングも含めた幅で割っているようです。",
    -2 * (math.exp(0.3) + xi + math.exp(-0.1)) / 3: "トークンごとの比（GRPO）になっているようです。",
    -xi: "アドバンテージが掛かっていないようです。",
}
hint = hint_for(values[2.0, 0.5], hints, "式と見比べてみましょう。")
assert close(values[2.0, 0.5], -2 * xi), f"{hint}（{values[2.0, 0.5]:.6f}、正しくは {-2 * xi:.6f}）"
hints = {-2 * xi: "クリップが働いていません。", 2.02: "符号が逆のようです。"}
hint = hint_for(values[2.0, 0.01], hints, "1 + ε に切られます。")
assert close(values[2.0, 0.01], -2.02), f"{hint}（{values[2.0, 0.01]:.6f}、正しくは −2.02）"
for epsilon in (0.5, 0.01):
    hint = hint_for(values[-2.0, epsilon], {2.02: "min をとりましょう。Â < 0 で ξ > 1 なら、切られません。"},
                    "Â < 0 の場合を確かめましょう。")
    assert close(values[-2.0, epsilon], 2 * xi), f"{hint}（{values[-2.0, epsilon]:.6f}、正しくは {2 * xi:.6f}）"
print("✓ 一つの回答の値")
### BEGIN HIDDEN TESTS
for log_w, A, epsilon, expected in (
    ([-0.4, -0.2], 1.5, 0.1, -1.5 * math.exp(-0.3)), ([-0.4, -0.2], -1.5, 0.1, 1.35),
    ([-0.4, -0.2], -1.5, 0.4, 1.5 * math.exp(-0.3)), ([0.1] * 4, 1.0, 4e-4, -1.0004),
    ([1.0, -1.0], 1.0, 4e-4, -1.0), ([0.01] * 100, 1.0, 0.5, -math.exp(0.01)),
):
    logps, old, mask = one_row(log_w, pads=3)
    value = gspo_loss(logps, old, torch.tensor([A]).double(), mask, epsilon).item()
    assert close(value, expected), f"Â = {A}、ε = {epsilon} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、長さが 2、8、0 の 3 つの回答のミニバッチです。方策は生成時と同じなので $\xi=1$ です。アドバンテージは 1、−0.2、5 とします。

# %% nbgrader={"grade": true, "grade_id": "test_batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
same = torch.full((3, 8), -1.5, dtype=torch.float64)
mask = (torch.arange(8) < torch.tensor([[2], [8], [0]])).double()
advantages = torch.tensor([1.0, -0.2, 5.0], dtype=torch.float64)
value = gspo_loss(same, same, advantages, mask, 4e-4).item()
hints = {
    -0.04: "トークンの数で重みをつけています。回答ごとに 1 つの値です。",
    -5.8 / 3: "トークンのない回答は、ξ = 1 ではなく、0 として数えます。",
    -0.4: "トークンのない回答も、平均の分母に入れます。",
    -0.8: "合計になっているようです。平均にしましょう。",
}
hint = hint_for(value, hints, "回答ごとの値を平均します。")
assert close(value, -0.8 / 3), f"{hint}（{value:.6f}、正しくは −0.266667）"
print("✓ ミニバッチの平均")
### BEGIN HIDDEN TESTS
for seed, lengths in enumerate([(3, 1, 5), (2, 2), (1, 0, 4, 2), (0, 0)]):
    logps, old, advantages, mask = random_batch(lengths, seed + 20)
    expected = 0.0
    for i, size in enumerate(lengths):
        if size:
            xi = math.exp(sum((logps[i, t] - old[i, t]).item() for t in range(size)) / size)
            A = advantages[i].item()
            expected -= min(xi * A, min(max(xi, 0.9), 1.1) * A) / len(lengths)
    value = gspo_loss(logps, old, advantages, mask, 0.1)
    assert value.shape == () and close(value.item(), expected), f"長さ {lengths} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。切られていない回答では、どのトークンの勾配も $-\widehat A_i\,\xi_i/(B\,|y_i|)$、切られた回答では、全部のトークンが 0 です。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logps = torch.tensor([[0.3, 0.1, -0.1], [0.3, 0.1, -0.1]]).double().requires_grad_()
old, advantages = (torch.tensor(v, dtype=torch.float64, requires_grad=True)
                   for v in ([[0.0] * 3] * 2, [2.0, -2.0]))
gspo_loss(logps, old, advantages, torch.ones(2, 3), 0.01).backward()
assert logps.grad is not None, "方策に勾配が流れていません。"
for data, name in ((old, "生成時の方策"), (advantages, "アドバンテージ")):
    assert data.grad is None or not data.grad.any(), f"{name}に勾配が流れています。"
assert not logps.grad[0].any(), "切られた回答の勾配は、全部のトークンで 0 です。"
for grad in logps.grad[1].tolist():
    expected = 2 * math.exp(0.1) / 6
    assert close(grad, expected), f"勾配は {expected:.6f} です。いまは {grad:.6f}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
logps, _, A, mask = random_batch((4, 1, 2, 3), seed=21)
logps.requires_grad_()
advantages = A.clone().requires_grad_()
gspo_loss(logps, logps, advantages, mask, 4e-4).backward()  # 方策オン
expected = -mask * (A / (4 * mask.sum(-1)))[:, None]
assert torch.allclose(logps.grad, expected), "方策オンの勾配は −Â/(B|y|) です。"
assert advantages.grad is None or not advantages.grad.any(), "アドバンテージに勾配が流れています。"

logps, old, advantages, mask = random_batch((4, 1, 6), seed=22)
logps.requires_grad_()
gspo_loss(logps, old, advantages, mask, 0.2).backward()
for i, size in enumerate((4, 1, 6)):
    xi = math.exp(sum((logps[i, t] - old[i, t]).item() for t in range(size)) / size)
    A = advantages[i].item()
    cut = (A > 0 and xi > 1.2) or (A < 0 and xi < 0.8)
    expected = 0.0 if cut else -A * xi / (3 * size)
    assert all(close(x, expected) for x in logps.grad[i, :size].tolist()), "勾配が違います。"
    assert not logps.grad[i, size:].any(), "パディングに勾配が流れています。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた系列の重要度比です。学習は、エラーも出ずに動きます。

# %% nbgrader={"grade": false, "grade_id": "buggy_ratio", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_ratio(logps, old_logps, mask):
    log_w = (logps - old_logps) * mask
    return log_w.mean(-1).exp()


# %% [markdown]
# 正しい比なら、次の 3 つがいつでも成り立ちます。
#
# 1. **出発点** $\pi_\theta=\pi_{\theta_{\mathrm{old}}}$ なら、 $\xi=1$ です。
# 2. **入れ替え** いまの方策と生成時の方策を入れ替えると、 $\xi$ は逆数になります（下の表には、2 つの積を出します）。
# 3. **一定の対数比** どのトークンの対数比も $c$ なら、長さによらず $\xi=e^{c}$ です（下の表では $c=0.5$、いちばん短い回答の値を出します）。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(ratio, lengths):
    """3 つの恒等式の名前、左辺、右辺"""
    logps, old, _, mask = random_batch(lengths, seed=2)
    mask = mask[:, : max(lengths)]  # 幅は、いちばん長い回答に合わせる
    logps, old = logps[:, : max(lengths)], old[:, : max(lengths)]
    short = min(range(len(lengths)), key=lambda i: lengths[i])
    start = ratio(old, old, mask)[0]
    there, back = ratio(logps, old, mask), ratio(old, logps, mask)
    shifted = ratio(old + 0.5, old, mask)[short]
    return [
        ("1 出発点　　　", start.item(), 1.0),
        ("2 入れ替え　　", (there * back)[0].item(), 1.0),
        ("3 一定の対数比", shifted.item(), math.exp(0.5)),
    ]


def show_identities(ratio, lengths):
    for name, left, right in identities(ratio, lengths):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_ratio, lengths=(4, 4))

# %% [markdown]
# ### 2.1　どれが破れているか
#
# 長さがどれも 4 なら、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_ratio, lengths=(…))` を呼び、回答の長さをいろいろに変えてみましょう。
# 成り立たなくなる恒等式の番号を `failed_identity` に、長さが `(2, 8)` のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（lengths=(2, 8) のとき）
### BEGIN SOLUTION
failed_identity = 3
left_side = identities(buggy_ratio, lengths=(2, 8))[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
assert not close(left_side, math.exp(0.5), 0.01), "それは右辺か、長さがそろっているときの値です。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
assert failed_identity == 3, "破れているのは別の恒等式です。"
assert close(left_side, math.exp(0.5 * 2 / 8), 0.002), "長さ (2, 8) で左辺を測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_ratio` の誤りを直したものを `repaired_ratio` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_ratio", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_ratio(logps, old_logps, mask):
    ### BEGIN SOLUTION
    log_w = (logps - old_logps) * mask
    return (log_w.sum(-1) / mask.sum(-1)).exp()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for lengths in ((4, 4), (2, 8), (1, 3, 5)):
    for name, left, right in identities(repaired_ratio, lengths):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed, lengths in ((31, (3, 6, 1)), (32, (2, 2))):
    logps, old, _, mask = random_batch(lengths, seed)
    xi = repaired_ratio(logps, old, mask)
    for i, size in enumerate(lengths):
        log_w = sum((logps[i, t] - old[i, t]).item() for t in range(size))
        assert close(xi[i].item(), math.exp(log_w / size)), f"長さ {lengths} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# ### 3.1　予想する
#
# - `predicted_xi` ： 100 トークンの回答で、どのトークンの対数比も 0.01 のとき、 $\xi$ はいくつでしょうか。
# - `predicted_objective` ： 対数比 0.1 のトークンが 4 つの回答で、 $\widehat A=1$、 $\epsilon=4\times10^{-4}$ のとき、 $\widehat W$ はいくつでしょうか。
# - `predicted_mean` ： 生成時の方策は、文字 a と b を、いつも半々に書きます。いまの方策は、a を 0.8、b を 0.2 で書きます。回答は、どれもちょうど 2 文字です。 $\mathbb{E}_{y\sim\pi_{\theta_{\mathrm{old}}}}[\xi]$ はいくつでしょうか。回答は 4 通りしかないので、手で計算できます。

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_xi = ξ の値
# predicted_objective = Ŵ の値
# predicted_mean = ξ の期待値
### BEGIN SOLUTION
predicted_xi = math.exp(0.01)
predicted_objective = 1.0004
predicted_mean = (math.sqrt(0.5 * 0.8) + math.sqrt(0.5 * 0.2)) ** 2
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert predicted_xi > 1 and predicted_objective > 1, "どちらも 1 より大きな数です。"
assert not close(predicted_xi, math.e, 0.01), "それは比の積です。"
assert not close(predicted_objective, math.exp(0.1), 1e-3), "クリップを忘れていませんか。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_xi, math.exp(0.01), 2e-4), "ξ の予想が違います。"
assert close(predicted_objective, 1.0004, 2e-5), "Ŵ の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_mean", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 < predicted_mean, "期待値は正の数です。"
assert not close(predicted_mean, 1.0, 1e-3), "期待値が 1 になるのは、積 ρ のほうです。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_mean, 0.9, 0.005), "期待値の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 長さ `length` の回答を全部数え上げて、 $\mathbb{E}_{y\sim\pi_{\theta_{\mathrm{old}}}}[\rho]$ と $\mathbb{E}_{y\sim\pi_{\theta_{\mathrm{old}}}}[\xi]$ を計算してください。 $\rho=\prod_tw_t$ は比の積です。 `letters` は回答のトークン番号の表 (V^L, L) で、トークンの確率は接頭辞によりません。

# %% nbgrader={"grade": false, "grade_id": "expected_ratios", "locked": false, "schema_version": 3, "solution": true, "task": false}
def expected_ratios(old, new, length):
    """トークンの確率 old と new（長さ V のリスト）から、(E_old[ρ], E_old[ξ]) を返す"""
    old, new = torch.tensor([old, new], dtype=torch.float64)
    letters = torch.cartesian_prod(*[torch.arange(len(old))] * length).reshape(-1, length)
    ### BEGIN SOLUTION
    chances = old[letters].prod(-1)
    log_w = (new / old).log()[letters]
    rho, xi = log_w.sum(-1).exp(), log_w.mean(-1).exp()
    return (chances * rho).sum().item(), (chances * xi).sum().item()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_expected_ratios", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
measured = expected_ratios([0.5, 0.5], [0.8, 0.2], 2)
assert len(measured) == 2, "2 つの期待値を返してください。"
assert close(measured[0], 1.0), "積 ρ の期待値は 1 です。回答の確率を掛けて足します。"
one = expected_ratios([0.5, 0.5], [0.8, 0.2], 1)
assert close(one[1], 1.0), "長さ 1 なら ξ = ρ なので、ξ の期待値も 1 です。"
assert measured[1] < 1, "長さがそろっていれば、ξ の期待値は 1 を超えません。"
print("✓ 測れました")
### BEGIN HIDDEN TESTS
for old, new in (([0.5, 0.5], [0.8, 0.2]), ([0.2, 0.3, 0.5], [0.4, 0.4, 0.2])):
    for length in (1, 2, 3, 5):
        rho, xi = expected_ratios(old, new, length)
        each = sum(p ** (1 - 1 / length) * q ** (1 / length) for p, q in zip(old, new, strict=True))
        assert close(rho, 1.0) and close(xi, each**length), f"長さ {length} で期待値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。
# 長さを変えた値も出します。長い回答では、どんな値に近づくでしょうか（ $e^{-D_{\mathrm{KL}}[\pi_{\theta_{\mathrm{old}}}\|\pi_\theta]/L}$ と比べてみましょう）。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
print(f"E[ξ]（2 文字）   予想 {predicted_mean:.4f}   測定 {measured[1]:.4f}")
for length in (1, 2, 4, 8):
    rho, xi = expected_ratios([0.5, 0.5], [0.8, 0.2], length)
    print(f"{length} 文字   E[ρ] = {rho:.4f}   E[ξ] = {xi:.4f}")
print(f"1 文字あたりの KL から   {math.exp(0.5 * math.log(1.6) + 0.5 * math.log(0.4)):.4f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 次は、同じ 8 つの回答で 4 回続けて更新したときに、切られたものの割合です。GRPO（ $\epsilon=0.2$ ）ではトークンの、GSPO（ $\epsilon=0.2$ と $\epsilon=4\times10^{-4}$ ）では回答の割合です。

# %% nbgrader={"grade": false, "grade_id": "stale_training", "locked": true, "schema_version": 3, "solution": false, "task": false}
def clipped_shares(level, epsilon, updates=4, lr=0.1):
    """8 つの回答（長さ 16、文字は 4 種類）で続けて更新し、切られた割合を返す"""
    y = torch.randint(4, (8, 16), generator=torch.Generator().manual_seed(0))
    logits = torch.zeros(16, 4, dtype=torch.float64, requires_grad=True)  # はじめは一様
    optimizer = torch.optim.Adam([logits], lr=lr)
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)[:, None]
    shares = []
    for _ in range(updates):
        log_w = logits.log_softmax(-1)[torch.arange(16), y] - math.log(0.25)
        ratio = log_w.exp() if level == "token" else log_w.mean(-1, keepdim=True).exp()
        beyond = (ratio - 1) * advantages.sign() > epsilon
        shares.append(beyond.double().mean().item())
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return shares


# %% nbgrader={"grade": false, "grade_id": "stale_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
lines = {"GRPO 0.2": ("token", 0.2), "GSPO 0.2": ("sequence", 0.2), "GSPO 4e-4": ("sequence", 4e-4)}
shares = {name: clipped_shares(*setting) for name, setting in lines.items()}
curves(shares, {"切られた割合": {name: name for name in lines}}, xlabel="何回目の更新か")

# %% [markdown]
# 次の 3 つに触れながら、3〜6 文で説明してください。
#
# - 1 回目の更新では、なぜ、どれも 0 なのか。サポートページの設定（1 回の生成で 1 回の更新）で $\epsilon$ を変えると、何が起きるか
# - GSPO の $\epsilon$ が、GRPO の 0.2 よりずっと小さいのはなぜか（長さ $L$ を使って）
# - $\xi$ は重要度サンプリングの重みではないのに、何の役に立つのか。また、自分の学習で $\epsilon$ を選ぶには、何を見ればよいか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 1 回目の更新では、いまの方策と生成時の方策が同じで、比はすべて 1 だからです。1 回の生成で 1 回しか更新しないなら、いつでも比は 1 で、 $\epsilon$ を変えても何も変わらず、GSPO の勾配は GRPO の勾配と同じです。 $\xi$ は $L$ 個の対数比の平均の指数なので、トークンの対数比がほぼ無相関なら、広がりはトークンの $1/\sqrt L$ になり、同じ割合を切るには $\epsilon$ もそれだけ小さくする必要があります。 $\xi$ を掛けても期待値は正しく直りませんが（ $\mathbb{E}[\xi]\ne1$ ）、積のように長さとともに分散が増えることがなく、ずれすぎた回答を回答ごとに学習から外す目印になります。 $\epsilon$ は、2 回目以降の更新での `clip_ratio` （TRL）を見て、回答の長さと学習率に合わせて選びます。
#
# **採点の目安** 1 回目は比が 1 で、1 回だけの更新では $\epsilon$ が働かないこと（1 点）、平均で広がりが $1/\sqrt L$ に縮むこと（1 点）、期待値を直す代わりに分散が小さく、クリップの目印になること、 `clip_ratio` を見て選ぶこと（1 点）。
