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
# # 演習 4.5.4.2 IPO
#
# IPO の損失関数を、論文の「和の形」と TRL の「トークン平均の形」の両方で書き、ほかの人の実装に潜む誤りを見つけ、学習の行き先を先に言い当ててから測ります。4.5.4.2 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 損失関数を 2 つの形で実装する | 8 |
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
# | $y_w, y_\ell$ | 好まれた回答、好まれなかった回答 | `chosen`, `rejected` | – |
# | $\log\pi_\theta(y_w\mid x),\ \log\pi_\theta(y_\ell\mid x)$ | 方策の対数確率（トークンについての和） | `chosen_logps`, `rejected_logps` | (B,) |
# | $\log\pi_{\mathrm{ref}}(y_w\mid x),\ \log\pi_{\mathrm{ref}}(y_\ell\mid x)$ | 参照方策の対数確率（同じく和） | `ref_chosen_logps`, `ref_rejected_logps` | (B,) |
# | $\lvert y_w\rvert, \lvert y_\ell\rvert$ | 回答のトークン数（EOS を含む） | `chosen_lengths`, `rejected_lengths` | (B,) |
# | $\beta$ | KL 正則化の係数（論文では $\tau$ ） | `beta` | – |
# | $\Delta$ | 2 つの対数確率比の差（ $y_w$ のもの − $y_\ell$ のもの） | – | (B,) |

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


def random_logps(batch, seed):
    """chosen, rejected, ref_chosen, ref_rejected の対数確率、形状 (B,)"""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(4, batch, generator=generator, dtype=torch.float64)
    return list(-20 * uniform)


def hint_for(value, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if close(value, wrong):
            return hint
    return otherwise


# %% [markdown]
# ## 問 1　損失関数を 2 つの形で実装する（8 点）
#
# 論文の IPO の損失は次の通りです。
#
# $$
# \mathcal{L}_{\mathrm{IPO}}(\theta)=\mathbb{E}_{(x,y_w,y_\ell)}\left[\left(\Delta-\frac{1}{2\beta}\right)^2\right],\qquad
# \Delta=\log\frac{\pi_\theta(y_w\mid x)}{\pi_{\mathrm{ref}}(y_w\mid x)}
# -\log\frac{\pi_\theta(y_\ell\mid x)}{\pi_{\mathrm{ref}}(y_\ell\mid x)}
# $$
#
# TRL は、それぞれの対数確率比を回答のトークン数で割ります。
#
# $$
# \Delta=\frac{1}{\lvert y_w\rvert}\log\frac{\pi_\theta(y_w\mid x)}{\pi_{\mathrm{ref}}(y_w\mid x)}
# -\frac{1}{\lvert y_\ell\rvert}\log\frac{\pi_\theta(y_\ell\mid x)}{\pi_{\mathrm{ref}}(y_\ell\mid x)}
# $$
#
# 一つの関数で両方を書いてください。長さを渡されなければ（ `None` なら）和の形、両方の長さを渡されればトークン平均の形です。期待値は、ミニバッチの平均で置き換えます。参照方策の対数確率はデータとして扱い、勾配を流しません。

# %% nbgrader={"grade": false, "grade_id": "ipo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ipo_loss(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta,
    chosen_lengths=None, rejected_lengths=None,
):
    """IPO の損失（スカラー）を返す。対数確率と長さはどれも形状 (B,)"""
    ### BEGIN SOLUTION
    chosen_scores = chosen_logps - ref_chosen_logps.detach()
    rejected_scores = rejected_logps - ref_rejected_logps.detach()
    if chosen_lengths is not None:
        chosen_scores = chosen_scores / chosen_lengths
        rejected_scores = rejected_scores / rejected_lengths
    delta = chosen_scores - rejected_scores
    return ((delta - 1 / (2 * beta)) ** 2).mean()
    ### END SOLUTION


# %% [markdown]
# はじめは、和の形を、手で計算できる 1 対で確かめます。対数確率比は $y_w$ が $+4$、 $y_\ell$ が $-2$ で $\Delta=6$、 $\beta=0.1$ なので目標は $5$ です。

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
c, r, ref_c, ref_r = -torch.tensor([[9.0], [15.0], [13.0], [13.0]]).double()
loss = ipo_loss(c, r, ref_c, ref_r, beta=0.1)
assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"

hints = {
    16.0: "目標が 1/β になっているようです。1/(2β) です。",
    34.81: "目標が β になっているようです。1/(2β) です。",
    35.4025: "目標が β/2 になっているようです。1/(2β) です。",
    19.36: "Δ に β が掛かっているようです。DPO と違い、Δ はそのままです。",
    121.0: "y_w と y_ℓ が入れ替わっているか、目標の符号が逆のようです。",
    -1.0: "損失の符号が逆のようです。2 乗の平均なので、負になりません。",
    0.5: "2 乗を半分にしているようです。",
    2.0: "2 乗ではなく、絶対値になっているようです。",
    0.0: "目標に届かない対の損失が、0 に切り詰められているようです。",
}
for gap, expected in ((6, 1.0), (3, 4.0)):  # Δ と、正しい損失
    value = ipo_loss(c - 6 + gap, r, ref_c, ref_r, beta=0.1).item()
    hint = hint_for(value, hints, "式と見比べてみましょう。")
    assert close(value, expected), f"{hint}（{value:.6f}、正しくは {expected:g}）"

start = ipo_loss(c, r, c, r, beta=0.1).item()
assert close(start, 25.0), (
    f"方策と参照方策が等しければ 1/(4β²) = 25 です。いまは {start:.6f} です。"
    "参照方策の対数確率を引いているか、確かめましょう。")
print("✓ 1 対の値")
### BEGIN HIDDEN TESTS
for seed, beta in enumerate([0.05, 0.1, 0.5, 2.0]):
    c, r, ref_c, ref_r = random_logps(1, seed)
    delta = ((c - ref_c) - (r - ref_r)).item()
    value = ipo_loss(c, r, ref_c, ref_r, beta).item()
    assert close(value, (delta - 1 / (2 * beta)) ** 2), f"β = {beta}、Δ = {delta:.3f} で値が違います。"
for far in (-200.0, 300.0):
    zero = torch.zeros(1, dtype=torch.float64)
    value = ipo_loss(zero + far, zero, zero, zero, 0.1).item()
    assert close(value, (far - 5) ** 2), f"Δ = {far} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、3 対からなるミニバッチです。 $\beta=0.5$、 $\Delta=(2,0,-1)$ とします。

# %% nbgrader={"grade": true, "grade_id": "test_batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
zeros = torch.zeros(3, dtype=torch.float64)
gaps = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
value = ipo_loss(gaps - 5, zeros - 5, zeros - 5, zeros - 5, beta=0.5).item()

hints = {
    6.0: "ミニバッチの合計になっているようです。平均にしましょう。",
    0.444444: "平均をとるのは 2 乗のあとです。順序が逆のようです。",
    4 / 3: "2 乗ではなく、絶対値になっているようです。",
}
hint = hint_for(value, hints, "対ごとの値を平均します。")
assert close(value, 2.0), f"{hint}（{value:.6f}、正しくは 2）"
print("✓ ミニバッチの平均")
### BEGIN HIDDEN TESTS
for batch in (2, 5, 8):
    c, r, ref_c, ref_r = random_logps(batch, seed=batch)
    delta = ((c - ref_c) - (r - ref_r)).tolist()
    expected = sum((x - 1 / 0.6) ** 2 for x in delta) / batch
    loss = ipo_loss(c, r, ref_c, ref_r, 0.3)
    assert loss.shape == () and close(loss.item(), expected), f"B = {batch} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# トークン平均の形です。同じ対（対数確率比 $+4$ と $-2$ ）で、 $y_w$ が 4 トークン、 $y_\ell$ が 2 トークンなら、 $\Delta=1-(-1)=2$ です。

# %% nbgrader={"grade": true, "grade_id": "test_lengths", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
c, r, ref_c, ref_r = -torch.tensor([[9.0], [15.0], [13.0], [13.0]]).double()
four, two = torch.tensor([4]), torch.tensor([2])
value = ipo_loss(c, r, ref_c, ref_r, 0.1, four, two).item()
hints = {
    1.0: "長さで割られていないようです。",
    16.0: "2 つの長さの和で割っているようです。それぞれの長さで割ります。",
    12.25: "片方の長さで、両方を割っているようです。",
    4.0: "片方の長さで、両方を割っているようです。",
    6.25: "長さが取り違えられていないか、確かめましょう。",
}
hint = hint_for(value, hints, "それぞれの対数確率比を、その回答の長さで割ります。")
assert close(value, 9.0), f"{hint}（{value:.6f}、正しくは 9）"

start = ipo_loss(c, r, c, r, 0.1, four, two).item()
assert close(start, 25.0), "方策と参照方策が等しければ、この形でも 25 です。"
print("✓ トークン平均の形")
### BEGIN HIDDEN TESTS
c, r, ref_c, ref_r = random_logps(4, seed=12)
n_w, n_l = torch.tensor([1, 3, 7, 2]), torch.tensor([4, 3, 1, 6])
expected = 0.0
for i in range(4):
    delta = (c[i] - ref_c[i]).item() / n_w[i].item() - (r[i] - ref_r[i]).item() / n_l[i].item()
    expected += (delta - 1.25) ** 2 / 4
value = ipo_loss(c, r, ref_c, ref_r, 0.4, n_w, n_l).item()
assert close(value, expected), "長さの違うミニバッチで値が違います。"
value = ipo_loss(c, r, ref_c, ref_r, 0.4, n_w.double(), n_l.double()).item()
assert close(value, expected), "長さが小数の型のときに値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。出発点（方策 = 参照方策）では、和の形の勾配は、 $y_w$ の対数確率について $-\frac{1}{\beta B}$、 $y_\ell$ について $+\frac{1}{\beta B}$ です。目標を過ぎれば、符号が逆になります。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
c, ref_c = [torch.tensor([-12.0, -7.0], requires_grad=True) for _ in range(2)]
r, ref_r = [torch.tensor([-15.0, -6.0], requires_grad=True) for _ in range(2)]
ipo_loss(c, r, ref_c, ref_r, beta=0.5).backward()

for logps in (c, r):
    assert logps.grad is not None, "方策に勾配が流れていません。"
for logps in (ref_c, ref_r):
    detached = logps.grad is None or not logps.grad.any()
    assert detached, "参照方策に勾配が流れています。"
for logps, expected in ((c, -1.0), (r, 1.0)):
    for grad in logps.grad.tolist():
        assert close(grad, expected), f"勾配は {expected} です。いまは {grad}"

zero, past = torch.zeros(1), torch.tensor([3.0], requires_grad=True)
ipo_loss(past, zero, zero, zero, beta=0.5).backward()
slope = past.grad.item()
assert close(slope, 4.0), f"目標 1 を過ぎた Δ = 3 では、勾配は 4 です。いまは {slope}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
c = torch.tensor([-12.0, -7.0], requires_grad=True)
r = torch.tensor([-15.0, -6.0], requires_grad=True)
ipo_loss(c, r, c, r, beta=0.5).backward()
for logps, expected in ((c, -1.0), (r, 1.0)):
    for grad in logps.grad.tolist():
        assert close(grad, expected), "参照方策の勾配が、方策の勾配を打ち消しています。"

c, r, ref_c, ref_r = random_logps(3, seed=21)
c.requires_grad_()
r.requires_grad_()
n_w, n_l = torch.tensor([1, 4, 2]), torch.tensor([5, 2, 2])
ipo_loss(c, r, ref_c, ref_r, 0.3, n_w, n_l).backward()
for i in range(3):
    delta = ((c[i] - ref_c[i]) / n_w[i] - (r[i] - ref_r[i]) / n_l[i]).item()
    push = 2 * (delta - 1 / 0.6) / 3
    assert close(c.grad[i].item(), push / n_w[i].item()), f"Δ = {delta:.3f} で勾配が違います。"
    assert close(r.grad[i].item(), -push / n_l[i].item()), f"Δ = {delta:.3f} で勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が DPO の実装を書き換えて作った IPO の損失です（和の形）。損失は $\frac{1}{4\beta^2}$ から出発し、学習とともに下がります。ところが、できあがったモデルは参照方策から離れすぎているようです。

# %% nbgrader={"grade": false, "grade_id": "buggy_ipo_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_ipo_loss(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
):
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)
    margin = chosen_rewards - rejected_rewards
    return ((margin - 1 / (2 * beta)) ** 2).mean()


# %% [markdown]
# 正しい損失なら、次の 3 つがいつでも成り立ちます。1 対の損失を $\mathcal{L}(y_w,y_\ell)$ と書きます。
#
# 1. **出発点** 方策と参照方策が等しければ、 $\mathcal{L}(y_w,y_\ell)=\frac{1}{4\beta^2}$ です。
# 2. **入れ替え** 好まれた回答と好まれなかった回答を入れ替えると、 $\Delta$ の符号が変わるので、 $\mathcal{L}(y_w,y_\ell)-\mathcal{L}(y_\ell,y_w)=-\frac{2\Delta}{\beta}$ です。
# 3. **平行移動** 方策の対数確率の両方に同じ数 $c$ を足しても、 $\mathcal{L}(y_w,y_\ell)$ は変わりません。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, beta):
    """3 つの恒等式の名前、左辺、右辺"""
    c, r, ref_c, ref_r = random_logps(1, seed=2)
    delta = (c - ref_c) - (r - ref_r)
    value = loss(c, r, ref_c, ref_r, beta)
    swapped = loss(r, c, ref_r, ref_c, beta)
    shifted = loss(c + 1.7, r + 1.7, ref_c, ref_r, beta)
    start = loss(c, r, c, r, beta)
    return [
        ("1 出発点　", start.item(), 1 / (4 * beta**2)),
        ("2 入れ替え", (value - swapped).item(), (-2 * delta / beta).item()),
        ("3 平行移動", shifted.item(), value.item()),
    ]


def show_identities(loss, beta):
    for name, left, right in identities(loss, beta):
        print(f"{name}   左辺 {left:9.4f}   右辺 {right:9.4f}")


show_identities(buggy_ipo_loss, beta=0.1)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# 成り立っていない恒等式の番号を `failed_identity` に、 $\beta=0.4$ のときにその左辺が右辺の何倍になるかを `ratio` に入れてください。何倍になるかは、誤りの正体を教えてくれます。新しいセルを足して `show_identities(buggy_ipo_loss, beta=…)` を呼び、 `beta` を変えながら確かめてみましょう。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# ratio = 左辺 ÷ 右辺（β = 0.4 のとき）
### BEGIN SOLUTION
failed_identity = 2
_, left, right = identities(buggy_ipo_loss, beta=0.4)[failed_identity - 1]
ratio = left / right
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(ratio), "ratio には数を入れてください。"
assert not close(ratio, 1, 0.01), "1 倍なら、その恒等式は成り立っています。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
assert failed_identity == 2, "破れているのは別の恒等式です。"
assert close(ratio, 0.4, 0.005), "左辺が右辺の何倍かを、β = 0.4 で測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_ipo_loss` の誤りを直したものを `repaired_ipo_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_ipo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_ipo_loss(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
):
    ### BEGIN SOLUTION
    chosen_ratios = chosen_logps - ref_chosen_logps
    rejected_ratios = rejected_logps - ref_rejected_logps
    gap = chosen_ratios - rejected_ratios
    return ((gap - 1 / (2 * beta)) ** 2).mean()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for beta in (0.1, 0.4):
    for name, left, right in identities(repaired_ipo_loss, beta):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed, beta in ((31, 0.05), (32, 0.7)):
    c, r, ref_c, ref_r = random_logps(6, seed)
    delta = ((c - ref_c) - (r - ref_r)).tolist()
    expected = sum((x - 1 / (2 * beta)) ** 2 for x in delta) / 6
    assert close(repaired_ipo_loss(c, r, ref_c, ref_r, beta).item(), expected), (
        f"β = {beta} で値が違います。")
zero = torch.zeros(1, dtype=torch.float64)
for far in (-200.0, 300.0):
    value = repaired_ipo_loss(zero + far, zero, zero, zero, 0.1).item()
    assert close(value, (far - 5) ** 2), f"Δ = {far} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 3 つの恒等式は、自分の `ipo_loss` を試すのにも使えます。次のセルは採点しません。

# %%
show_identities(ipo_loss, beta=0.4)

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# プロンプトは 1 つ、回答は A と B の 2 つだけという小さな世界を考えます。
#
# - A が B より好まれる確率は $0.8$ です。
# - 参照方策は $\pi_{\mathrm{ref}}(\mathrm{A})=0.2,\ \pi_{\mathrm{ref}}(\mathrm{B})=0.8$、 $\beta=0.2$ です。
#
# ### 3.1　予想する
#
# 選好データセットが無限に大きいとして、IPO の損失（和の形）を最小にする方策 $\pi^*$ を考えます。計算機で学習する前に、紙と鉛筆で次の 2 つを求めてください。式（`math.exp` など）で書いても、数で書いても構いません。
#
# - `predicted_gap` ：2 つの対数確率比の差 $\displaystyle\log\frac{\pi^*(\mathrm{A})}{\pi_{\mathrm{ref}}(\mathrm{A})}-\log\frac{\pi^*(\mathrm{B})}{\pi_{\mathrm{ref}}(\mathrm{B})}$
# - `predicted_prob` ：確率 $\pi^*(\mathrm{A})$ （小数第 2 位まで合っていれば正解です）

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_gap = 対数確率比の差
# predicted_prob = A の確率
### BEGIN SOLUTION
predicted_gap = (2 * 0.8 - 1) / (2 * 0.2)
predicted_prob = 0.2 * math.exp(predicted_gap) / (0.2 * math.exp(predicted_gap) + 0.8)
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_gap", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
gap = predicted_gap
assert not close(gap, 2.5, 0.005), "B が好まれる場合も、データに入っています。"
assert not close(gap, 6.93, 0.01), "それは DPO の行き先です。"
assert not close(gap, 3.0, 0.005), "1/(2β) の 2 を忘れていませんか。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_gap, 1.5, 0.01), "対数確率比の差の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_prob", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
p = predicted_prob
assert 0 < p < 1, "確率は 0 と 1 のあいだの数です。"
assert not close(p, 0.8, 0.001), "好まれる確率と、方策の確率は別です。"
assert not close(p, 0.818, 0.005), "参照方策を忘れていませんか。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_prob, 0.5284, 0.006), "A の確率の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 勾配法で実際に学習します。 `win` の確率で A が、 $1-$ `win` の確率で B が好まれた回答になります。データが無限にあるときの損失、つまり IPO の損失の期待値そのものを `loss` に書いてください。問 1 の `ipo_loss` を使っても、式を直接書いても構いません。

# %% nbgrader={"grade": false, "grade_id": "trained_policy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trained_policy(win, ref_probs, beta, steps=200):
    """期待損失を勾配法で最小にした方策の確率 (2,) を返す。回答は A、B の順"""
    ref_logps = torch.tensor(ref_probs, dtype=torch.float64).log()
    logits = ref_logps.clone().requires_grad_()  # 参照方策から出発します
    optimizer = torch.optim.SGD([logits], lr=0.1)
    for _ in range(steps):
        logps = logits.log_softmax(0)
        ### BEGIN SOLUTION
        a, b, ref_a, ref_b = logps[:1], logps[1:], ref_logps[:1], ref_logps[1:]
        a_wins = ipo_loss(a, b, ref_a, ref_b, beta)
        b_wins = ipo_loss(b, a, ref_b, ref_a, beta)
        loss = win * a_wins + (1 - win) * b_wins
        ### END SOLUTION
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return logits.softmax(0).detach()


# %% nbgrader={"grade": true, "grade_id": "test_trained_policy", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
measured = trained_policy(win=0.8, ref_probs=(0.2, 0.8), beta=0.2)
assert measured.shape == (2,), "2 つの回答の確率を返してください。"
assert close(measured.sum().item(), 1), "確率の和が 1 になりません。"
assert measured[0] < 0.7, "B が好まれる場合も損失に入っていますか。"
assert measured[0] > 0.21, "A の確率が増えていません。向きを確かめましょう。"
print("✓ 学習できました")
### BEGIN HIDDEN TESTS
for win, ref_probs, beta in (
    (0.8, (0.2, 0.8), 0.2), (0.3, (0.7, 0.3), 0.4), (1.0, (0.6, 0.4), 1.0), (0.5, (0.6, 0.4), 0.1)
):
    odds = ref_probs[0] / ref_probs[1] * math.exp((2 * win - 1) / (2 * beta))
    value = trained_policy(win, ref_probs, beta)[0].item()
    assert close(value, odds / (1 + odds), 1e-4), f"勝率 {win}、β = {beta} で行き先が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
a, b = (measured.log() - torch.tensor([0.2, 0.8]).log()).tolist()
p = measured[0].item()
print(f"対数確率比の差   予想 {predicted_gap:.4f}   測定 {a - b:.4f}")
print(f"A の確率         予想 {predicted_prob:.4f}   測定 {p:.4f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 回答は 2 つ、一方がいつでも好まれる、という選好データで、対数確率比の差 $\Delta$ の動きを DPO と IPO で比べます。 $\beta=0.1$ です。更新の大きさは、それぞれの損失の勾配に合わせました。

# %% nbgrader={"grade": false, "grade_id": "two_trainings", "locked": true, "schema_version": 3, "solution": false, "task": false}
beta, dpo_gap, ipo_gap = 0.1, torch.tensor(0.0), torch.tensor(0.0)
history = {"dpo": [], "ipo": []}
for _ in range(300):
    history["dpo"].append(dpo_gap.item())
    history["ipo"].append(ipo_gap.item())
    dpo_gap = dpo_gap + 100 * beta * torch.sigmoid(-beta * dpo_gap)
    ipo_gap = ipo_gap + 0.02 * 2 * (1 / (2 * beta) - ipo_gap)

# %% nbgrader={"grade": false, "grade_id": "two_figures", "locked": true, "schema_version": 3, "solution": false, "task": false}
curves(history, {"$\\Delta$（nat）": {"DPO": "dpo", "IPO": "ipo"}})

# %% [markdown]
# DPO の差は伸びつづけ、IPO の差は 5 で止まります。次の 3 つに触れながら、3〜6 文で説明してください。
#
# - DPO の差は、なぜ止まらないのか（ $\beta$ を大きくすれば止まるか）
# - IPO の差は、なぜ 5 で止まるのか
# - 同じデータで、回答がどちらも 7 トークンのモデルを TRL の `loss_type="ipo"` で学習させたら、差の目標はいくつになるか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** DPO の勾配の重み $\beta\,\sigma(-\beta\Delta)$ は、 $\Delta$ がどれだけ大きくなっても正のままです。損失 $-\log\sigma(\beta\Delta)$ は減りつづけ、最小点がありません。 $\beta$ を大きくしても伸び方が遅くなるだけで、止まりません。IPO の重み $2(\frac{1}{2\beta}-\Delta)$ は $\Delta=\frac{1}{2\beta}=5$ で 0 になり、そこを過ぎると負になって引き戻すので、5 で止まります。TRL の IPO は対数確率比をトークン数で割ってから比べるので、どちらも 7 トークンなら、和の差の目標は 7 倍の $\frac{7}{2\beta}=35$ です。
#
# **採点の目安** DPO の重みが正のままで最小点がなく、 $\beta$ では止まらないこと（1 点）、IPO の重みが $\frac{1}{2\beta}$ で 0 になること（1 点）、TRL では 35 になること（1 点）。
