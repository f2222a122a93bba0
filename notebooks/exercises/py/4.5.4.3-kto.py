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
# # 演習 4.5.4.3 KTO
#
# 参照点と KTO の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、学習の行き先を先に言い当ててから測ります。4.5.4.3 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 参照点と損失関数を実装する | 8 |
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
# | $\mathcal{Y}^+(x),\ \mathcal{Y}^-(x)$ | 望ましい回答、望ましくない回答 | `desirable` （True / False） | (B,) |
# | $\log\pi_\theta(y\mid x),\ \log\pi_{\mathrm{ref}}(y\mid x)$ | 系列の対数確率 | `logps`, `ref_logps` | (B,) |
# | $h_\theta(x,y)$ | 対数確率比 $\log\frac{\pi_\theta(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}$ | – | (B,) |
# | $z_0$ | 参照点 | `reference_point` | スカラー |
# | $\beta$ | 係数 | `beta` | – |
# | $w_+,\ w_-$ | 望ましい回答、望ましくない回答の重み | `desirable_weight`, `undesirable_weight` | – |

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


def sigmoid(a):
    return 1 / (1 + math.exp(-a))


def random_batch(batch, seed):
    """対数確率 (B,) と参照方策の対数確率 (B,)、ラベル (B,)"""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(2, batch, generator=generator, dtype=torch.float64)
    labels = torch.rand(batch, generator=generator) < 0.5
    return -8 * uniform[0], -8 * uniform[1], labels


def hint_for(value, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if close(value, wrong):
            return hint
    return otherwise


# %% [markdown]
# ## 問 1　参照点と損失関数を実装する（8 点）
#
# ### 1.1　組み違いの対
#
# 参照点は、回答を 1 つずつずらして、別のプロンプトと組み合わせた対から計算します。 $i$ 番目のプロンプトには $i-1$ 番目の回答を、先頭のプロンプトには最後の回答を組み合わせます。
# 回答のリスト $[y_1,\dots,y_B]$ から、組み違いの回答のリストを作ってください。1 行だけでは組み違いが作れないので、 `ValueError` を起こしてください。

# %% nbgrader={"grade": false, "grade_id": "mismatched", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mismatched(completions):
    """回答のリスト [y_1, ..., y_B] を 1 つずらしたリストを返す"""
    ### BEGIN SOLUTION
    if len(completions) < 2:
        raise ValueError("組み違いの対を作るには、2 行以上が必要です")
    return [completions[-1], *completions[:-1]]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_mismatched", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
result = list(mismatched(["a", "b", "c"]))
hints = {
    ("c", "b", "a"): "逆順では、真ん中の回答が自分のプロンプトと組になります。",
    ("b", "c", "a"): "ずらす向きが逆です。先頭には最後の回答が来ます。",
    ("a", "b", "c"): "ずれていません。",
}
hint = hints.get(tuple(result), "1 つずつ、後ろへずらします。")
assert result == ["c", "a", "b"], f"{hint}（あなたの答え {result}）"
try:
    mismatched(["a"])
except ValueError:
    print("✓ 組み違いの対")
else:
    raise AssertionError("1 行のときは ValueError を起こしましょう。")
### BEGIN HIDDEN TESTS
for size in (2, 4, 5):
    rows = [f"y{i}" for i in range(size)]
    assert list(mismatched(rows)) == [rows[i - 1] for i in range(size)], f"{size} 行で違います。"
try:
    mismatched([])
except ValueError:
    pass
else:
    raise AssertionError("空のリストでも ValueError を起こしましょう。")
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　参照点
#
# 組み違いの対の対数確率比を平均し、0 で切ります。勾配は流しません。
#
# $$
# z_0=\max\Bigl(0,\ \frac1B\sum_{i=1}^{B}h_\theta(x_i,y_{i-1})\Bigr)
# $$

# %% nbgrader={"grade": false, "grade_id": "kto_reference_point", "locked": false, "schema_version": 3, "solution": true, "task": false}
def kto_reference_point(mismatched_logps, ref_mismatched_logps):
    """組み違いの対の対数確率 (B,) から、参照点（スカラー）を返す"""
    ### BEGIN SOLUTION
    mean = (mismatched_logps - ref_mismatched_logps).mean()
    return mean.clamp(min=0).detach()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_reference_point", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logps = torch.tensor([-1.0, -6.0, -2.0], requires_grad=True)
ref = torch.tensor([-4.0, -4.0, -7.0])
point = kto_reference_point(logps, ref)
assert isinstance(point, torch.Tensor), "torch のテンソルを返しましょう。"
assert point.shape == (), "参照点はスカラーです。平均をとりましょう。"
hints = {
    6.0: "合計になっているようです。平均にしましょう。",
    -2.0: "引き算の向きが逆のようです。",
    8 / 3: "行ごとに切ってから平均しているようです。平均してから切ります。",
    0.0: "引き算の向きが逆か、参照方策の対数確率が引かれていないようです。",
    -3.0: "参照方策の対数確率が引かれていないようです。",
}
hint = hint_for(point.item(), hints, "式と見比べてみましょう。")
assert close(point.item(), 2.0), f"{hint}（{point.item():.4f}、正しくは 2）"
assert not point.requires_grad, "参照点に勾配が流れています。"
negative = kto_reference_point(ref, logps.detach()).item()
assert close(negative, 0.0), f"負の平均は 0 に切ります。（{negative:.4f}）"
print("✓ 参照点")
### BEGIN HIDDEN TESTS
for seed in range(6):
    logps, ref, _ = random_batch(2 + seed, seed)
    expected = max(0.0, sum((logps - ref).tolist()) / len(logps))
    value = kto_reference_point(logps.clone().requires_grad_(), ref)
    assert value.shape == () and not value.requires_grad, "スカラーで、勾配を持たない値です。"
    assert close(value.item(), expected), "別の数値で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.3　KTO の損失
#
# 望ましい回答の価値は $\sigma(\beta(h_\theta-z_0))$、望ましくない回答の価値は $\sigma(\beta(z_0-h_\theta))$ です。損失は、 $w\,(1-\text{価値})$ の **全行の平均** です。 $w$ は、望ましい回答では $w_+$、望ましくない回答では $w_-$ です。
# 参照方策の対数確率と参照点はデータとして扱い、勾配を流しません。

# %% nbgrader={"grade": false, "grade_id": "kto_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def kto_loss(
    logps, ref_logps, desirable, reference_point, beta,
    desirable_weight=1.0, undesirable_weight=1.0,
):
    """KTO の損失（スカラー）を返す。対数確率とラベルは形状 (B,)"""
    ### BEGIN SOLUTION
    a = beta * (logps - ref_logps.detach() - reference_point.detach())
    return torch.where(
        desirable,
        desirable_weight * (1 - torch.sigmoid(a)),
        undesirable_weight * (1 - torch.sigmoid(-a)),
    ).mean()
    ### END SOLUTION


# %% [markdown]
# はじめは、1 行ずつ。 $\beta=0.1$、対数確率比は $+2$、参照点は $1$ です。

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logp, ref = torch.tensor([-12.0]).double(), torch.tensor([-14.0]).double()
point = torch.tensor(1.0, dtype=torch.float64)
values = []
for label in (True, False):
    loss = kto_loss(logp, ref, torch.tensor([label]), point, 0.1)
    assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
    assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"
    values.append(loss.item())

hints = {
    0.524979: "符号が逆のようです。価値が大きいほど、損失は小さくなります。",
    0.450166: "参照点が引かれていないようです。",
    0.785835: "参照方策の対数確率が引かれていないようです。",
    0.268941: "β が掛かっていないようです。",
    0.644397: "価値の対数をとっているようです。KTO では対数をとりません。",
    0.475021: "望ましくない回答では、σ の中の符号が逆になります。",
    0.574443: "参照点の符号が逆のようです。z₀ − h です。",
}
hint = hint_for(values[0], hints, "式と見比べてみましょう。")
assert close(values[0], 0.475021), (
    f"望ましい回答: {hint}（{values[0]:.6f}、正しくは 0.475021）")
hint = hint_for(values[1], hints, "式と見比べてみましょう。")
assert close(values[1], 0.524979), (
    f"望ましくない回答: {hint}（{values[1]:.6f}、正しくは 0.524979）")
print("✓ 1 行の値")
### BEGIN HIDDEN TESTS
for seed, beta in enumerate([0.05, 0.1, 0.5, 2.0]):
    logp, ref, _ = random_batch(1, seed)
    for label, sign in ((True, 1), (False, -1)):
        for z in (0.0, 0.7):
            expected = 1 - sigmoid(sign * beta * ((logp - ref).item() - z))
            value = kto_loss(logp, ref, torch.tensor([label]), torch.tensor(z).double(), beta)
            assert close(value.item(), expected), f"β = {beta}、z₀ = {z} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、望ましい回答 1 つと望ましくない回答 3 つのミニバッチです。 $w_+=3,\ w_-=0.5$ とします。方策は参照方策と同じ、参照点は 0 なので、価値はどれも $1/2$ です。

# %% nbgrader={"grade": true, "grade_id": "test_batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
four = torch.full((4,), -5.0, dtype=torch.float64)
one_good = torch.tensor([True, False, False, False])
zero = torch.tensor(0.0, dtype=torch.float64)
value = kto_loss(four, four, one_good, zero, 0.1, 3.0, 0.5).item()
hints = {
    1.75: "ラベルごとに平均してから足しているようです。全行で平均します。",
    0.875: "ラベルごとの平均の平均のようです。全行で平均します。",
    2.25: "ミニバッチの合計になっているようです。平均にしましょう。",
    1.1875: "2 つの重みが入れ替わっているようです。",
    0.5: "重みが掛かっていないようです。",
}
hint = hint_for(value, hints, "行ごとの値を平均します。")
assert close(value, 0.5625), f"{hint}（{value:.6f}、正しくは 0.5625）"
for label in (True, False):  # ラベルが一種類でも計算できる
    one_label = torch.full((4,), label)
    value = kto_loss(four, four, one_label, zero, 0.1).item()
    assert close(value, 0.5), "ラベルが一種類だけのバッチで値が違います。"
print("✓ ミニバッチの平均と重み")
### BEGIN HIDDEN TESTS
for batch in (2, 5, 8):
    logps, ref, labels = random_batch(batch, seed=batch)
    expected = 0.0
    for h, label in zip((logps - ref).tolist(), labels.tolist(), strict=True):
        sign, w = (1, 2.0) if label else (-1, 0.25)
        expected += w * (1 - sigmoid(sign * 0.3 * (h - 0.4))) / batch
    value = kto_loss(logps, ref, labels, torch.tensor(0.4).double(), 0.3, 2.0, 0.25)
    assert value.shape == () and close(value.item(), expected), f"B = {batch} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。参照点にいる回答の勾配の大きさは、 $w\beta/(4B)$ です。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logps, ref = [torch.tensor([-3.0, -7.0], requires_grad=True) for _ in range(2)]
point = torch.tensor(0.0, requires_grad=True)
both = torch.tensor([True, False])
kto_loss(logps, ref, both, point, 0.1, 2.0, 1.0).backward()
assert logps.grad is not None, "方策に勾配が流れていません。"
for data, name in ((ref, "参照方策"), (point, "参照点")):
    detached = data.grad is None or not data.grad.any()
    assert detached, f"{name}に勾配が流れています。"
for grad, expected in zip(logps.grad.tolist(), (-0.025, 0.0125), strict=True):
    assert close(grad, expected), f"勾配は {expected} です。いまは {grad}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
logps = torch.tensor([-3.0, -7.0], requires_grad=True)
kto_loss(logps, logps, torch.tensor([True, False]), torch.tensor(0.0), 0.1).backward()
for grad, expected in zip(logps.grad.tolist(), (-0.0125, 0.0125), strict=True):
    assert close(grad, expected), "参照方策の勾配が、方策の勾配を打ち消しています。"

logps, ref, labels = random_batch(6, seed=21)
logps.requires_grad_()
point = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
kto_loss(logps, ref, labels, point, 0.4, 3.0, 0.5).backward()
assert point.grad is None or not point.grad.any(), "参照点に勾配が流れています。"
for i in range(6):
    v = sigmoid(0.4 * ((logps[i] - ref[i]).item() - 0.5))
    w = -3.0 if labels[i] else 0.5
    assert close(logps.grad[i].item(), w * 0.4 * v * (1 - v) / 6), "勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた KTO の損失です。学習を始めると損失は 0.5 から出発し、少しずつ下がります。

# %% nbgrader={"grade": false, "grade_id": "buggy_kto_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_kto_loss(logps, ref_logps, desirable, reference_point, beta):
    h = logps - ref_logps
    gain = torch.sigmoid(beta * (h - reference_point))
    loss = torch.sigmoid(beta * (-h - reference_point))
    return (1 - torch.where(desirable, gain, loss)).mean()


# %% [markdown]
# 正しい損失（ $w_+=w_-=1$ ）なら、次の 3 つがいつでも成り立ちます。1 行の損失を、ラベルに応じて $\mathcal{L}^+,\ \mathcal{L}^-$ と書きます。
#
# 1. **出発点** 方策と参照方策が等しく、 $z_0=0$ なら、 $\mathcal{L}^+=\mathcal{L}^-=1/2$ です（下の表には 2 つの平均を出します）。
# 2. **ラベルの入れ替え** $\sigma(a)+\sigma(-a)=1$ なので、 $\mathcal{L}^++\mathcal{L}^-=1$ です。
# 3. **平行移動** 方策と参照方策の対数確率の両方に同じ数 $c$ を足しても、 $\mathcal{L}^+,\ \mathcal{L}^-$ は変わりません。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, beta, z):
    """3 つの恒等式の名前、左辺、右辺"""
    logp, ref, _ = random_batch(1, seed=2)
    point, zero = torch.tensor([z, 0.0]).double()
    yes, no = torch.tensor([True]), torch.tensor([False])
    plus = loss(logp, ref, yes, point, beta)
    minus = loss(logp, ref, no, point, beta)
    start = (loss(ref, ref, yes, zero, beta) + loss(ref, ref, no, zero, beta))
    shifted = loss(logp + 1.7, ref + 1.7, no, point, beta)
    return [
        ("1 出発点　　　　", (start / 2).item(), 0.5),
        ("2 ラベル入れ替え", (plus + minus).item(), 1.0),
        ("3 平行移動　　　", shifted.item(), minus.item()),
    ]


def show_identities(loss, beta, z):
    for name, left, right in identities(loss, beta, z):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_kto_loss, beta=0.5, z=0.0)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# $z_0=0$ では、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_kto_loss, beta=0.5, z=…)` を呼び、 `z` を変えてみましょう。
# 成り立たなくなる恒等式の番号を `failed_identity` に、 $\beta=0.5,\ z_0=2$ のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（β = 0.5、z₀ = 2 のとき）
### BEGIN SOLUTION
failed_identity = 2
left_side = identities(buggy_kto_loss, beta=0.5, z=2.0)[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
assert not close(left_side, 1.0, 0.01), "それは右辺か、z₀ = 0 のときの値です。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
_logp, _ref, _ = random_batch(1, seed=2)
_h = (_logp - _ref).item()
_left = 2 - sigmoid(0.5 * (_h - 2)) - sigmoid(0.5 * (-_h - 2))
assert failed_identity == 2, "破れているのは別の恒等式です。"
assert close(left_side, _left, 0.002), "β = 0.5、z₀ = 2 で左辺を測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_kto_loss` の誤りを直したものを `repaired_kto_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_kto_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_kto_loss(logps, ref_logps, desirable, reference_point, beta):
    ### BEGIN SOLUTION
    h = logps - ref_logps
    gain = torch.sigmoid(beta * (h - reference_point))
    loss = torch.sigmoid(beta * (reference_point - h))
    return (1 - torch.where(desirable, gain, loss)).mean()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for beta, z in ((0.5, 0.0), (0.5, 2.0), (0.1, 1.0)):
    for name, left, right in identities(repaired_kto_loss, beta, z):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed, beta, z in ((31, 0.05, 3.0), (32, 0.4, 0.6)):
    logps, ref, labels = random_batch(6, seed)
    expected = sum(
        1 - sigmoid((1 if label else -1) * beta * (h - z))
        for h, label in zip((logps - ref).tolist(), labels.tolist(), strict=True)) / 6
    value = repaired_kto_loss(logps, ref, labels, torch.tensor(z).double(), beta).item()
    assert close(value, expected), f"β = {beta}、z₀ = {z} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# プロンプトは 1 つ、回答は A、B、C の 3 つだけという小さな世界を考えます。
#
# - 参照方策は一様です。評価データの回答も、3 つが同じ割合で出てきます。
# - 「良い」というラベルが付く割合 $q$ は、A が 0.6、B が 0.3、C が 0.1 です。
# - 参照点は $z_0=0$、 $\beta=0.5$ です。
#
# データが無限に多いときの KTO の損失を、勾配法で長く学習します。
#
# ### 3.1　予想する
#
# - `predicted_equal` ： $w_+=w_-=1$ のとき、A の確率は、最後にはいくつに近づくでしょうか。
# - `predicted_border` ： $w_-=1$ のまま $w_+$ を大きくしていくと、B は「下げたい回答」から「上げたい回答」に変わります。その境目の $w_+$ はいくつでしょうか。

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_equal = A の確率
# predicted_border = 境目の w₊
### BEGIN SOLUTION
predicted_equal = 1.0
predicted_border = (1 - 0.3) / 0.3
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_equal", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_equal <= 1, "確率は 0 から 1 までの数です。"
assert not close(predicted_equal, 0.6, 0.01), "q は、方策の確率とは別のものです。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_equal, 1.0, 0.02), "A の確率の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_border", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert predicted_border > 1, "B は、w₊ = 1 では下げたい回答です。"
assert not close(predicted_border, 10 / 3, 0.02), "境目の式を確かめましょう。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_border, 7 / 3, 0.02), "境目の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# データが無限にあるときの損失（期待値）を `loss` に書いてください。回答ごとに、確率 `q` で True、 $1-$ `q` で False のラベルが付きます。問 1 の `kto_loss` を使っても、式を直接書いても構いません。

# %% nbgrader={"grade": false, "grade_id": "trained_policy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trained_policy(q, beta, w_plus=1.0, w_minus=1.0, steps=400):
    """期待損失を勾配法で下げた方策の確率 (K,) を返す"""
    q = torch.tensor(q, dtype=torch.float64)
    ref_logps = torch.full_like(q, -math.log(len(q)))  # 一様
    logits = ref_logps.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(steps):
        logps = logits.log_softmax(0)
        ### BEGIN SOLUTION
        value = torch.sigmoid(beta * (logps - ref_logps))
        rows = w_plus * q * (1 - value) + w_minus * (1 - q) * value
        loss = rows.mean()
        ### END SOLUTION
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return logits.softmax(0).detach()


# %% nbgrader={"grade": true, "grade_id": "test_trained_policy", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
Q = (0.6, 0.3, 0.1)
measured = trained_policy(Q, beta=0.5)
assert measured.shape == (3,), "3 つの回答の確率を返してください。"
assert close(measured.sum().item(), 1), "確率の和が 1 になりません。"
assert measured[0] > measured[1], "A の確率が増えていません。"
print("✓ 学習できました")
### BEGIN HIDDEN TESTS
assert trained_policy((0.6, 0.3, 0.1), 0.5)[0] > 0.97, "A の行き先が違います。"
# 良い回答が 2 つ: β ≤ 1 なら最小点は一つで、|w₊q − w₋(1−q)|·σ'(βh)/π が等しくなる
for q, w_plus, w_minus in (((0.8, 0.6, 0.1), 1.0, 1.0), ((0.6, 0.4, 0.1), 4.0, 1.0),
                           ((0.8, 0.7, 0.2), 1.0, 1.5)):
    p = trained_policy(q, 0.5, w_plus, w_minus)
    assert p[2] < 0.02, f"q = {q} で、悪い回答が残っています。"
    v = torch.sigmoid(0.5 * (p * 3).log())
    slope = (torch.tensor(q) * (w_plus + w_minus) - w_minus) * v * (1 - v) / p
    assert close(slope[0].item() / slope[1].item(), 1.0, 0.02), f"q = {q} で行き先が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
print(f"A の確率   予想 {predicted_equal:.4f}   測定 {measured[0].item():.4f}")
for w in (predicted_border - 0.3, predicted_border + 0.3):
    b = trained_policy(Q, beta=0.5, w_plus=w)[1].item()
    print(f"w₊ = {w:.2f} のとき、B の確率は {b:.4f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 次は、「良い」が全体の 1 割しかない評価データで、 $w_+$ を変えて学習した結果です。回答は 4 つですが、D は一度も評価されていません。

# %% nbgrader={"grade": false, "grade_id": "imbalance_training", "locked": true, "schema_version": 3, "solution": false, "task": false}
share_good = torch.tensor([0.2, 0.08, 0.02])  # A、B、C の q
history = {}
for w_plus in (1.0, 9.0):
    logits = torch.zeros(4, requires_grad=True)  # 参照方策は一様
    optimizer = torch.optim.Adam([logits], lr=0.1)
    history[f"A、{w_plus:g}"], history[f"D、{w_plus:g}"] = [], []
    for _ in range(100):
        probs = logits.softmax(0)
        value = torch.sigmoid(0.5 * (4 * probs[:3]).log())
        loss = (w_plus * share_good * (1 - value)
                + (1 - share_good) * value).mean()
        history[f"A、{w_plus:g}"].append(probs[0].item())
        history[f"D、{w_plus:g}"].append(probs[3].item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% nbgrader={"grade": false, "grade_id": "imbalance_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
curves(history, {
    "w₊ = 1": {"A の確率": "A、1", "D の確率": "D、1"},
    "w₊ = 9": {"A の確率": "A、9", "D の確率": "D、9"},
})

# %% [markdown]
# 次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - 重みがないとき、評価されていない D に確率が集まるのはなぜか
# - $w_+=9$ にすると A が残るのはなぜか（境目の $q$ を使って）
# - 損失が順調に下がっていても安心できないのはなぜか。自分の学習では何を見ればよいか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 損失は $\sigma$ の一次式で、 $q\,w_+<(1-q)\,w_-$ の回答は確率を下げるほど損失が減ります。重みがないときの境目は $q=1/2$ なので、 $q$ が 0.2 以下の A、B、C は、A も含めてすべて「下げたい回答」です。確率の和は 1 なので、減った分は、損失に現れない D へ移ります。 $w_+=9$ なら境目は $q=1/(9+1)=0.1$ になり、 $q=0.2$ の A は「上げたい回答」、B と C は「下げたい回答」になるので、確率は A に集まります。どちらの場合も損失は下がるので、損失だけでは区別できません。望ましい回答の対数確率比（TRL では `rewards/chosen` ）が上がっているか、実際に回答を生成して何が書かれるかを見る必要があります。
#
# **採点の目安** 評価された回答がすべて下げられ、残りへ移ること（1 点）、境目が 0.1 になること（1 点）、 `rewards/chosen` か生成した回答を見ること（1 点）。
