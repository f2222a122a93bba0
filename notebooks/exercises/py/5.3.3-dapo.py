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
# # 演習 5.3.3 DAPO
#
# 長さの罰と DAPO の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、動的サンプリングに要る生成の数を先に言い当ててから測ります。5.3.3 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 長さの罰と損失関数を実装する | 8 |
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
# | $\log\pi_\theta$、 $\log\pi_{\theta_{\mathrm{old}}}$ | トークンの対数確率（いまの方策、回答を引いたときの方策） | `logps`, `old_logps` | (B, T) |
# | $\widehat{A}_{i,t}$ | アドバンテージ（回答の中では同じ値） | `advantages` | (B,) |
# | – | 本物のトークンで 1、パディングで 0 | `mask` | (B, T) |
# | $w_{i,t}$ | 重要度比 $\pi_\theta/\pi_{\theta_{\mathrm{old}}}$ | – | (B, T) |
# | $\epsilon_{\mathrm{low}},\ \epsilon_{\mathrm{high}}$ | クリッピングの下側と上側の幅 | `epsilon_low`, `epsilon_high` | – |
# | $L_{\max},\ L_{\mathrm{cache}}$ | 長さの上限と、罰が始まってから上限までの幅 | `max_length`, `cache` | – |
# | $G$ | 一つのプロンプトに引く回答の数 | `group_size` | – |

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
from companion.notebook import setup

setup(seed=0)

# %% nbgrader={"grade": false, "grade_id": "imports", "locked": true, "schema_version": 3, "solution": false, "task": false}
import math

import torch

from companion.losses import degenerate_groups, group_advantages
from companion.plots import curves


def close(value, expected, tol=1e-6):
    return abs(value - expected) <= tol


def random_batch(lengths, seed):
    """対数確率 (B, T)、引いたときの対数確率 (B, T)、アドバンテージ (B,)、マスク (B, T)"""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths) + 1
    logps, old_logps = -torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).double()
    return logps, old_logps, advantages, mask


def by_hand(logps, old_logps, advantages, mask, low, high):
    """トークンごとの目的関数の和と、トークンの数"""
    total = 0.0
    for i, t in mask.nonzero().tolist():
        w, a = math.exp(logps[i, t] - old_logps[i, t]), advantages[i].item()
        total += min(w * a, min(max(w, 1 - low), 1 + high) * a)
    return total, int(mask.sum())


# %% [markdown]
# ## 問 1　長さの罰と損失関数を実装する（8 点）
#
# ### 1.1　長さの罰
#
# 式 (5.15) です。長さが $L_{\max}-L_{\mathrm{cache}}$ 以下なら 0、そこから $L_{\max}$ まで直線で $-1$ に下がり、 $L_{\max}$ を超えたら $-1$ のままです。
#
# $$
# r_{\mathrm{length}}(y)=\begin{cases}0&|y|\le L_{\max}-L_{\mathrm{cache}}\\[2pt]\dfrac{(L_{\max}-L_{\mathrm{cache}})-|y|}{L_{\mathrm{cache}}}&L_{\max}-L_{\mathrm{cache}}<|y|\le L_{\max}\\[4pt]-1&L_{\max}<|y|\end{cases}
# $$

# %% nbgrader={"grade": false, "grade_id": "overlong_penalty", "locked": false, "schema_version": 3, "solution": true, "task": false}
def overlong_penalty(lengths, max_length, cache):
    """長さのテンソル（実数）から、同じ形状の罰を返す"""
    ### BEGIN SOLUTION
    return ((max_length - cache - lengths) / cache).clamp(-1, 0)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_overlong", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
lengths = torch.tensor([80.0, 81.0, 90.0, 100.0, 101.0])
penalty = overlong_penalty(lengths, 100, 20)
assert isinstance(penalty, torch.Tensor), "torch のテンソルを返しましょう。"
assert penalty.shape == lengths.shape, "長さと同じ形状で返しましょう。"
hints = {
    0.5: "符号が逆のようです。罰は 0 以下です。",
    -0.9: "L_max で割っているか、罰の始まりが違うようです。",
    -0.1: "L_cache ではなく L_max で割っているようです。",
    0.0: "罰が始まるのは L_max − L_cache を超えたところです。",
    -1.0: "罰は、L_max まで少しずつ下がります。",
}
value = penalty[2].item()
hint = next((h for v, h in hints.items() if close(value, v)), "式と見比べてみましょう。")
assert close(value, -0.5), f"{hint}（90 トークンで {value:.4f}、正しくは -0.5）"
for k, expected in enumerate([0.0, -0.05, -0.5, -1.0, -1.0]):
    where = f"{lengths[k]:.0f} トークンで {penalty[k]:.4f}、正しくは {expected}"
    assert close(penalty[k].item(), expected), f"端の扱いを確かめましょう。（{where}）"
print("✓ 長さの罰")
### BEGIN HIDDEN TESTS
for _max, _cache in ((16, 4), (7, 7), (50, 13)):
    _all = torch.arange(1, _max + 9).double()
    for _n, _value in zip(_all.tolist(), overlong_penalty(_all, _max, _cache).tolist(), strict=True):
        _expected = min(0.0, max(-1.0, (_max - _cache - _n) / _cache))
        assert close(_value, _expected), f"L_max = {_max}、長さ {_n} で値が違います。"
_square = torch.full((2, 3), 10.0)
assert overlong_penalty(_square, 12, 4).shape == (2, 3), "長さと同じ形状で返しましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　DAPO の損失
#
# トークンの目的関数 (5.19) を、本物のトークン **全部** で平均し、符号を変えます (5.16)。
#
# $$
# \mathcal{L}=-\frac{1}{N}\sum_{i,t}\min\Bigl\{w_{i,t}\widehat{A}_i,\ \mathrm{clip}(w_{i,t},\,1-\epsilon_{\mathrm{low}},\,1+\epsilon_{\mathrm{high}})\,\widehat{A}_i\Bigr\}
# $$
#
# $N$ は、 `num_tokens` が渡されればその数、渡されなければ本物のトークンの数です。引いたときの対数確率とアドバンテージはデータとして扱い、勾配を流しません。

# %% nbgrader={"grade": false, "grade_id": "dapo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def dapo_loss(
    logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
    num_tokens=None,
):
    """DAPO の損失（スカラー）を返す"""
    ### BEGIN SOLUTION
    if num_tokens is None:
        num_tokens = mask.sum()
    real = mask > 0
    w = torch.where(real, logps - old_logps.detach(), 0.0).exp()
    A = advantages.detach()[:, None]
    clipped = w.clamp(1 - epsilon_low, 1 + epsilon_high)
    objective = torch.minimum(w * A, clipped * A)
    return -torch.where(real, objective, 0.0).sum() / num_tokens
    ### END SOLUTION


# %% [markdown]
# はじめは、1 トークンずつ。 $\epsilon_{\mathrm{low}}=0.2$、 $\epsilon_{\mathrm{high}}=0.28$ です。

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
cases = {  # (比 w, アドバンテージ): (正しい損失, {よくある誤りの値: 見直すところ})
    (1.25, 1.0): (-1.25, {
        1.25: "符号が逆のようです。損失は、目的関数の符号を変えたものです。",
        -1.2: "上側の幅に ε_low を使っているようです。",
        -math.log(1.25): "比は、対数の差の指数です。",
        -1.0: "重要度比が掛かっていないか、引く相手が違うようです。"}),
    (1.5, 1.0): (-1.28, {
        -1.5: "A > 0 で比が 1 + ε_high を超えたら、そこで切ります（min をとります）。",
        -1.2: "上側の幅に ε_low を使っているようです。"}),
    (0.75, -1.0): (0.8, {
        0.75: "A < 0 で比が 1 − ε_low より小さければ、そこで切ります（min をとります）。"}),
    (1.5, -1.0): (1.5, {1.28: "A < 0 のとき、比が大きい側は切りません（min をとります）。"}),
}
one = torch.ones(1, 1, dtype=torch.float64)
for (w, A), (expected, hints) in cases.items():
    loss = dapo_loss(math.log(w) - 3 * one, -3 * one, torch.tensor([A]).double(), one, 0.2, 0.28)
    assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
    assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"
    hint = next((h for v, h in hints.items() if close(loss.item(), v)), "式と見比べてみましょう。")
    assert close(loss.item(), expected), (
        f"w = {w}、A = {A:+.0f}: {hint}（{loss.item():.4f}、正しくは {expected}）")
print("✓ 1 トークンの値")
### BEGIN HIDDEN TESTS
_one = torch.ones(1, 1, dtype=torch.float64)
for _low, _high in ((0.1, 0.3), (0.3, 0.1), (0.2, 0.2)):
    for _w in (0.5, 0.8, 0.95, 1.0, 1.15, 1.25, 2.0):
        for _A in (1.3, -0.7):
            _clip = min(max(_w, 1 - _low), 1 + _high)
            _value = dapo_loss(
                math.log(_w) * _one, 0 * _one, torch.tensor([_A]).double(), _one, _low, _high)
            assert close(_value.item(), -min(_w * _A, _clip * _A)), f"w = {_w} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、長さ 1 と 3 の 2 つの回答です。比はどれも 1、アドバンテージは $-1$ と $-3$ なので、トークンの損失は 1 と 3, 3, 3 です。パディングには、わざと大きな数が入れてあります。

# %% nbgrader={"grade": true, "grade_id": "test_batch", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logps = torch.tensor([[-1.0, 0, 0, 0], [-1, -2, -3, 0]]).double()
old_logps = torch.tensor([[-1.0, -1e4, -1e4, -1e4], [-1, -2, -3, -1e4]]).double()
mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]])
A = torch.tensor([-1.0, -3.0]).double()
value = dapo_loss(logps, old_logps, A, mask, 0.2, 0.28).item()
hints = {
    2.0: "回答ごとに平均してから平均しているようです（GRPO の平均です）。",
    10 / 8: "パディングも含めた数で割っているようです。",
    10.0: "合計になっているようです。トークンの数で割りましょう。",
    5.0: "回答の数で割っているようです。トークンの数で割りましょう。",
}
hint = next((h for v, h in hints.items() if close(value, v)), "トークンで平均しましょう。")
assert math.isfinite(value), (
    "パディングの値が漏れています（∞ × 0 は NaN です）。exp の前に、対数比を 0 にしておきましょう。")
assert close(value, 2.5), f"{hint}（{value:.4f}、正しくは 2.5）"
value = dapo_loss(logps, old_logps, A, mask, 0.2, 0.28, num_tokens=20).item()
assert close(value, 0.5), f"num_tokens が渡されたら、その数で割ります。（{value:.4f}、正しくは 0.5）"
print("✓ トークンの平均")
### BEGIN HIDDEN TESTS
for _seed, _lengths in enumerate([(3, 3), (1, 7, 2), (5, 0, 2, 4)]):
    _batch = random_batch(_lengths, _seed)
    _total, _tokens = by_hand(*_batch, 0.1, 0.3)
    _value = dapo_loss(*_batch, 0.1, 0.3)
    assert _value.shape == () and close(_value.item(), -_total / _tokens), "別の数値で値が違います。"
    _value = dapo_loss(*_batch, 0.1, 0.3, num_tokens=50).item()
    assert close(_value, -_total / 50), "num_tokens を渡すと値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。クリッピングの内側のトークンの勾配は $-w\widehat{A}/N$、外側で止まったトークンの勾配は 0 です。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
w = torch.tensor([[1.25, 1.5], [1.5, 0.5]]).double()
logps = w.log().requires_grad_()
old_logps = torch.zeros(2, 2).double().requires_grad_()
A = torch.tensor([1.0, -1.0]).double().requires_grad_()
dapo_loss(logps, old_logps, A, torch.ones(2, 2), 0.2, 0.28).backward()
assert logps.grad is not None, "方策に勾配が流れていません。"
for data, name in ((old_logps, "引いたときの方策"), (A, "アドバンテージ")):
    assert data.grad is None or not data.grad.any(), f"{name}に勾配が流れています。"
for value, expected in zip(logps.grad.flatten().tolist(), (-1.25 / 4, 0, 1.5 / 4, 0), strict=True):
    assert close(value, expected), f"勾配は {expected} です。いまは {value:.4f}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
_same = torch.full((1, 1), -2.0).double().requires_grad_()
dapo_loss(_same, _same, torch.tensor([2.0]).double(), torch.ones(1, 1), 0.2, 0.28).backward()
assert close(_same.grad.item(), -2.0), "引いたときの方策の勾配が、方策の勾配を打ち消しています。"

_logps, _old, _A, _mask = random_batch((4, 1, 6), seed=5)
_logps.requires_grad_()
_leaf = _A.clone().requires_grad_()
dapo_loss(_logps, _old, _leaf, _mask, 0.2, 0.28).backward()
assert _leaf.grad is None or not _leaf.grad.any(), "アドバンテージに勾配が流れています。"
_ratio = (_logps - _old).exp().detach()
_stopped = torch.where(_A[:, None] > 0, _ratio > 1.28, _ratio < 0.8)
_expected = torch.where(_stopped, 0.0, -_ratio * _A[:, None] / 11) * _mask
assert (_logps.grad - _expected).abs().max() < 1e-6, "勾配が違います。"
_big = torch.zeros(1, 2).double().requires_grad_()
_far = torch.tensor([[0.0, -1e4]]).double()
dapo_loss(_big, _far, torch.tensor([1.0]).double(), torch.tensor([[1, 0]]), 0.2, 0.28).backward()
assert _big.grad.tolist() == [[-1.0, 0.0]], "パディングの値が、勾配に漏れています。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた、勾配蓄積のための DAPO の損失です。バッチを、いくつかの部分（マイクロバッチ）のリストで受け取ります。

# %% nbgrader={"grade": false, "grade_id": "buggy_dapo_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_dapo_loss(parts, epsilon_low=0.2, epsilon_high=0.28):
    """parts は (logps, old_logps, advantages, mask) のリスト"""
    total = 0.0
    for logps, old_logps, advantages, mask in parts:
        w = (logps - old_logps).exp()
        A = advantages[:, None]
        clipped = w.clamp(1 - epsilon_low, 1 + epsilon_high)
        objective = torch.minimum(w * A, clipped * A) * mask
        total = total - objective.sum() / mask.sum()
    return total / len(parts)


# %% [markdown]
# 正しい損失（バッチの全部のトークンの平均）なら、次の 3 つがいつでも成り立ちます。
#
# 1. **出発点** 比がどれも 1 で、アドバンテージがどれも 1 なら、損失は $-1$ です。
# 2. **切り方** 4 つの回答を、2 つずつの部分に切っても、切らずに 1 つの部分で渡しても、損失は同じです。左辺が切ったほう、右辺が切らないほうです。
# 3. **定数倍** アドバンテージを 2 倍にすると、損失も 2 倍です。左辺が 2 倍にしたほう、右辺がもとの損失の 2 倍です。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, lengths):
    """4 つの回答の長さから、3 つの恒等式の名前、左辺、右辺"""
    logps, old_logps, A, mask = random_batch(lengths, seed=3)

    def split(*batch):
        return list(zip(*(x.split(2) for x in batch), strict=True))

    start = loss(split(logps, logps, torch.ones_like(A), mask))
    parts = loss(split(logps, old_logps, A, mask))
    whole = loss([(logps, old_logps, A, mask)])
    doubled = loss(split(logps, old_logps, 2 * A, mask))
    return [
        ("1 出発点", start.item(), -1.0),
        ("2 切り方", parts.item(), whole.item()),
        ("3 定数倍", doubled.item(), 2 * parts.item()),
    ]


def show_identities(loss, lengths):
    for name, left, right in identities(loss, lengths):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_dapo_loss, lengths=(3, 3, 3, 3))

# %% [markdown]
# ### 2.1　どれが破れているか
#
# 長さがどれも 3 なら、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_dapo_loss, lengths=(…))` を呼び、4 つの長さを変えてみましょう。
# 成り立たなくなる恒等式の番号を `failed_identity` に、長さが $(1, 2, 6, 9)$ のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（長さが (1, 2, 6, 9) のとき）
### BEGIN SOLUTION
failed_identity = 2
left_side = identities(buggy_dapo_loss, lengths=(1, 2, 6, 9))[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
_batch = random_batch((1, 2, 6, 9), seed=3)
_first, _second = (by_hand(*(x[k] for x in _batch), 0.2, 0.28)
                   for k in (slice(0, 2), slice(2, 4)))
_left = -(_first[0] / _first[1] + _second[0] / _second[1]) / 2
assert failed_identity == 2, "破れているのは別の恒等式です。"
assert close(left_side, _left, 0.002), "長さ (1, 2, 6, 9) で左辺を測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_dapo_loss` の誤りを直したものを `repaired_dapo_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_dapo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_dapo_loss(parts, epsilon_low=0.2, epsilon_high=0.28):
    ### BEGIN SOLUTION
    num_tokens = sum(mask.sum() for *_, mask in parts)
    total = 0.0
    for logps, old_logps, advantages, mask in parts:
        w = (logps - old_logps).exp()
        A = advantages[:, None]
        clipped = w.clamp(1 - epsilon_low, 1 + epsilon_high)
        objective = torch.minimum(w * A, clipped * A) * mask
        total = total - objective.sum() / num_tokens
    return total
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for lengths in ((3, 3, 3, 3), (1, 2, 6, 9), (5, 1, 1, 1)):
    for name, left, right in identities(repaired_dapo_loss, lengths):
        assert close(left, right), f"「{name}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for _seed, _lengths in ((11, (2, 8, 1, 4)), (12, (7, 7, 1, 1))):
    _batch = random_batch(_lengths, _seed)
    _total, _tokens = by_hand(*_batch, 0.2, 0.28)
    for _size in (1, 2, 3, 4):
        _parts = list(zip(*(x.split(_size) for x in _batch), strict=True))
        _value = repaired_dapo_loss(_parts).item()
        assert close(_value, -_total / _tokens), f"{_size} 行ずつに切ると値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# 問題の半分は難しく（正解率 0.1）、半分は易しい（正解率 0.9）とします。 $G=4$ 個の回答を独立に引き、正解か不正解かで採点します。
# 動的サンプリングでは、差のつくグループが 16 個集まるまで、問題を（半々の確率で）引いて、生成を繰り返します。
#
# ### 3.1　予想する
#
# - `predicted_share` ： グループに差のつかない割合
# - `predicted_draws` ： 16 個集まるまでに引くグループの数の期待値

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_share = 割合
# predicted_draws = グループの数
### BEGIN SOLUTION
predicted_share = 0.9**4 + 0.1**4
predicted_draws = 16 / (1 - predicted_share)
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_share", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_share <= 1, "割合は 0 から 1 までの数です。"
assert not close(predicted_share, 0.125, 0.005), (
    "正解率の平均 0.5 を式に入れてはいけません。問題ごとに計算してから平均します。")
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_share, 0.6562, 0.005), "割合の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_draws", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert predicted_draws > 16, "差のつかないグループは捨てるので、16 個より多く引きます。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_draws, 16 / (1 - 0.6562), 0.6), "グループの数の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 差のつくグループが `wanted` 個集まるまで引く関数を書いてください。グループを一つ引くには `draw_group` を使います。返すのは、集めた報酬（形状は (wanted, G)）と、引いたグループの数です。

# %% nbgrader={"grade": false, "grade_id": "draw_group", "locked": true, "schema_version": 3, "solution": false, "task": false}
def draw_group(rates, G, generator):
    """正解率のリストから問題を一つ選び、G 個の報酬 (G,) を返す"""
    problem = torch.randint(len(rates), (), generator=generator)
    return (torch.rand(G, generator=generator) < rates[problem]).double()


# %% nbgrader={"grade": false, "grade_id": "fill_batch", "locked": false, "schema_version": 3, "solution": true, "task": false}
def fill_batch(rates, G, wanted, generator):
    """差のつくグループを wanted 個集め、(報酬 (wanted, G), 引いた数) を返す"""
    ### BEGIN SOLUTION
    kept, drawn = [], 0
    while len(kept) < wanted:
        rewards = draw_group(rates, G, generator)
        drawn += 1
        if not degenerate_groups(rewards, G).item():
            kept.append(rewards)
    return torch.stack(kept), drawn
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_fill_batch", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
generator = torch.Generator().manual_seed(0)
runs = [fill_batch([0.1, 0.9], 4, 16, generator) for _ in range(40)]
for rewards, _ in runs:
    assert rewards.shape == (16, 4), "報酬の形状は (wanted, G) です。"
    right = rewards.sum(1)
    assert ((0 < right) & (right < 4)).all(), "差のつかないグループが残っています。"
drawn = sum(n for _, n in runs) / len(runs)
assert drawn > 17, "捨てたグループも、引いた数に入れましょう。"
print("✓ 集められました")
### BEGIN HIDDEN TESTS
for _rates, _G, _wanted in (([0.1, 0.9], 4, 16), ([0.5], 2, 8), ([0.2, 0.7, 0.95], 3, 10)):
    _g = torch.Generator().manual_seed(1)
    _kept = sum(1 - p**_G - (1 - p)**_G for p in _rates) / len(_rates)
    _runs = [fill_batch(_rates, _G, _wanted, _g) for _ in range(60)]
    assert all(0 < r.sum() < _G for rewards, _ in _runs for r in rewards), "差のないグループです。"
    assert all(len(rewards) == _wanted for rewards, _ in _runs), "グループの数が違います。"
    _mean = sum(n for _, n in _runs) / 60
    _std = math.sqrt(_wanted * (1 - _kept)) / _kept / math.sqrt(60)  # 負の二項分布
    assert abs(_mean - _wanted / _kept) < 4 * _std, "引いたグループの数が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
print(f"差のつかない割合     予想 {predicted_share:.4f}   測定 {1 - 16 / drawn:.4f}")
print(f"引いたグループの数   予想 {predicted_draws:.2f}   測定 {drawn:.2f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 長い計算をしないと解けない問題を考えます。方策は、まず「考える」か「すぐ答える」かを選び（はじめは半々）、考えたときは、確率 0.04 で答えにたどり着きます。回答は 3 種類です。
#
# - 短い不正解：考えずに答えたもの。はじめの確率は 0.5
# - 正解：考えて、たどり着いたもの。はじめの確率は 0.02
# - 長い不正解：考えたが、たどり着かず、長くなりすぎたもの。はじめの確率は 0.48。長さの罰 $-0.5$ を受けるのは、これだけです
#
# $G=8$ のグループを 400 回引いて学習しました。左は罰を足さないとき、中央は罰を足したとき、右は罰を足して、正解だけでは差のつかないグループを捨てたとき（動的サンプリング）です。

# %% nbgrader={"grade": false, "grade_id": "penalty_training", "locked": true, "schema_version": 3, "solution": false, "task": false}
def train_with_penalty(penalty, dynamic):
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.04]).double().logit().requires_grad_()
    trace = []
    for _ in range(400):
        think, arrive = logits.sigmoid()
        probs = torch.stack([think * arrive, 1 - think, think * (1 - arrive)])
        trace.append(probs.detach())
        y = torch.multinomial(probs.detach(), 8, True, generator=generator)
        correct = (y == 0).double()
        if dynamic and degenerate_groups(correct, 8).item():
            continue
        A = group_advantages(correct - penalty * (y == 2), 8)
        (gradient,) = torch.autograd.grad((A * probs.log()[y]).mean(), logits)
        with torch.no_grad():
            logits += 0.2 * gradient
    return torch.stack(trace, 1)


# %% nbgrader={"grade": false, "grade_id": "penalty_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
kinds = ("正解", "短い不正解", "長い不正解")
settings = {"罰なし": (0.0, False), "罰あり": (0.5, False), "罰あり、動的サンプリング": (0.5, True)}
history = {f"{name}、{kind}": line for name, setting in settings.items()
           for kind, line in zip(kinds, train_with_penalty(*setting).tolist(), strict=True)}
curves(history, {
    name: {kind: f"{name}、{kind}" for kind in kinds} for name in settings
}, xlabel="引いたグループの数")

# %% [markdown]
# 次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - 全員が不正解のグループに罰を足すと、報酬とアドバンテージはどうなるか
# - 罰の大きさを $-0.5$ から $-0.05$ に変えると、中央の図はどう変わるか（理由も）
# - 動的サンプリングの判定を、罰を足したあとの報酬で行うと、右の図はどれと同じになるか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 正解の確率が小さいと、ほとんどのグループは全員が不正解で、罰を足さなければ報酬はどれも 0、アドバンテージも 0 です。罰を足すと、長い不正解だけが低い報酬になり、短い不正解のアドバンテージが正、長い不正解のアドバンテージが負になります。すると「考える」確率が下がり、考えなければたどり着けない正解も出なくなります。アドバンテージは std で割られるので、罰を 10 分の 1 にしても大きさはほとんど変わらず、中央の図もほとんど同じです。動的サンプリングの判定を正解だけで行えば、全員が不正解のグループは捨てられ、正解のあるグループだけから学ぶので、正解の確率が上がります。罰を足したあとの報酬で判定すると、全員が不正解のグループも「差がある」ので捨てられず、中央の図と同じようになります。
#
# **採点の目安** 全員が不正解でも差がつき、短い不正解がほめられること（1 点）、std で割るので罰の大きさによらないこと（1 点）、罰のあとで判定すると中央の図と同じになること（1 点）。
