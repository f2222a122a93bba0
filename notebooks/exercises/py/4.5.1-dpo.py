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
# # 演習 4.5.1 DPO
#
# 式 (4.19) の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、学習の行き先を先に言い当ててから測ります。4.5.1 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 損失関数を実装する | 8 |
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
# | $\log\pi_\theta(y_w\mid x),\ \log\pi_\theta(y_\ell\mid x)$ | 方策の対数確率（系列） | `chosen_logps`, `rejected_logps` | (B,) |
# | $\log\pi_{\mathrm{ref}}(y_w\mid x),\ \log\pi_{\mathrm{ref}}(y_\ell\mid x)$ | 参照方策の対数確率（系列） | `ref_chosen_logps`, `ref_rejected_logps` | (B,) |
# | $\beta$ | KL 正則化の係数 | `beta` | – |
# | $\Delta$ | 2 つの対数確率比の差 | – | (B,) |

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
# ## 問 1　損失関数を実装する（8 点）
#
# 本書の式 (4.19) は次の通りです。
#
# $$
# \mathcal{L}_{\mathrm{DPO}}(\theta)
# =-\mathbb{E}_{(x,y_w,y_\ell)\sim\mathcal{D}_{\mathrm{HF}}}
# \left[\log\sigma\left(\beta\Delta\right)\right],\qquad
# \Delta=\log\frac{\pi_\theta(y_w\mid x)}{\pi_{\mathrm{ref}}(y_w\mid x)}
# -\log\frac{\pi_\theta(y_\ell\mid x)}{\pi_{\mathrm{ref}}(y_\ell\mid x)}
# \tag{4.19}
# $$
#
# ### 1.1　系列の対数確率
#
# 式に現れる $\log\pi_\theta(y\mid x)$ は、回答全体の対数確率です。言語モデルが返すのはトークンごとの対数確率なので、まずそこから組み立てます。`mask` は回答のトークンで 1、パディングで 0 です。

# %% nbgrader={"grade": false, "grade_id": "sequence_logps", "locked": false, "schema_version": 3, "solution": true, "task": false}
def sequence_logps(token_logps, mask):
    """トークンの対数確率とマスク (B, T) から、系列の対数確率 (B,) を返す"""
    ### BEGIN SOLUTION
    return (token_logps * mask).sum(-1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_sequence_logps", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
token_logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.0, -9.0]])
mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
result = sequence_logps(token_logps, mask)

shape = tuple(result.shape)
assert shape == (2,), f"形状は (B,) = (2,) です。いまは {shape} です。"
hints = {
    (-2.0, -0.75): "トークン平均のようです。積の対数は、平均ではなく和です。",
    (-2.0, -0.5): "トークン平均のようです。積の対数は、平均ではなく和です。",
    (-6.0, -10.5): "パディングのトークンまで足しているようです。",
}
values = tuple(round(v, 6) for v in result.tolist())
hint = hints.get(values, "値が違います。")
assert values == (-6.0, -1.5), f"{hint}（あなたの値 {values}）"
print("✓ 系列の対数確率")
### BEGIN HIDDEN TESTS
generator = torch.Generator().manual_seed(11)
token_logps = -5 * torch.rand(4, 6, generator=generator, dtype=torch.float64)
mask = (torch.arange(6) < torch.tensor([[6], [1], [3], [5]])).double()
expected = [sum(token_logps[i, :n].tolist()) for i, n in enumerate((6, 1, 3, 5))]
result = sequence_logps(token_logps, mask).tolist()
for i in range(4):
    assert close(result[i], expected[i]), "長さの違う回答で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　DPO の損失
#
# 形状 (B,) の 4 つの対数確率と $\beta$ から、式 (4.19) の損失を計算してください。期待値はミニバッチの平均で置き換えます。気をつけたいことが 2 つあります。
#
# - 参照方策は固定されています。その対数確率はデータとして扱い、勾配を流しません。
# - 学習が進むと $\beta\Delta$ は大きな値にもなります。 $\pm 1000$ でも、損失と勾配が `inf` や `nan` にならないように書きましょう。

# %% nbgrader={"grade": false, "grade_id": "dpo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def dpo_loss(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
):
    """式 (4.19) の損失（スカラー）を返す。対数確率はどれも形状 (B,)"""
    ### BEGIN SOLUTION
    chosen_logratios = chosen_logps - ref_chosen_logps.detach()
    rejected_logratios = rejected_logps - ref_rejected_logps.detach()
    margin = beta * (chosen_logratios - rejected_logratios)
    return -torch.nn.functional.logsigmoid(margin).mean()
    ### END SOLUTION


# %% [markdown]
# はじめは、手で計算できる 1 対です。対数確率比は $y_w$ が $+1$ 、 $y_\ell$ が $-1$ なので、 $\Delta=2$ です。

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
c, r, ref_c, ref_r = -torch.tensor([[12.0], [15.0], [13.0], [14.0]]).double()
loss = dpo_loss(c, r, ref_c, ref_r, beta=0.1)
assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"

hints = {
    -0.598139: "損失の符号が逆のようです。負の対数なので、損失は正の数です。",
    0.798139: "y_w と y_ℓ が入れ替わっているか、σ の中の符号が逆のようです。",
    0.554355: "参照方策の対数確率が引かれていないようです。",
    0.513015: "参照方策の対数確率を、引かずに足しているようです。",
    0.012693: "β が σ の外にあるようです。",
    0.126928: "β が掛かっていないようです。",
    0.287335: "β が片方の対数確率比にしか掛かっていないようです。",
    1.103186: "β が参照方策の側に掛かっていないようです。",
    -0.549834: "σ の対数をとっていないようです。",
    -0.2: "σ を通していないようです。",
}
value = loss.item()
hint = hint_for(value, hints, "式と見比べてみましょう。")
assert close(value, 0.598139), f"{hint}（{value:.6f}、正しくは 0.598139）"

start = dpo_loss(c, r, c, r, beta=0.1).item()
assert close(start, math.log(2)), "方策と参照方策が等しければ log 2 です。"
print("✓ 1 対の値")
### BEGIN HIDDEN TESTS
for seed, beta in enumerate([0.05, 0.1, 0.5, 2.0]):
    c, r, ref_c, ref_r = random_logps(1, seed)
    m = beta * ((c - ref_c) - (r - ref_r)).item()
    expected = max(-m, 0.0) + math.log1p(math.exp(-abs(m)))
    value = dpo_loss(c, r, ref_c, ref_r, beta).item()
    assert close(value, expected), f"β = {beta}、βΔ = {m:.3f} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、3 対からなるミニバッチです。 $\beta=1$ 、 $\Delta=(2,0,-1)$ とします。

# %% nbgrader={"grade": true, "grade_id": "test_batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
zeros = torch.zeros(3, dtype=torch.float64)
delta = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
value = dpo_loss(delta - 5, zeros - 5, zeros - 5, zeros - 5, beta=1.0).item()

hints = {
    2.133337: "ミニバッチの合計になっているようです。平均にしましょう。",
    0.540306: "平均をとるのは σ の対数をとったあとです。順序が逆のようです。",
}
hint = hint_for(value, hints, "対ごとの値を平均します。")
assert close(value, 0.711112), f"{hint}（{value:.6f}、正しくは 0.711112）"
print("✓ ミニバッチの平均")
### BEGIN HIDDEN TESTS
for batch in (2, 5, 8):
    c, r, ref_c, ref_r = random_logps(batch, seed=batch)
    m = (0.3 * ((c - ref_c) - (r - ref_r))).tolist()
    expected = sum(max(-x, 0.0) + math.log1p(math.exp(-abs(x))) for x in m) / batch
    loss = dpo_loss(c, r, ref_c, ref_r, 0.3)
    assert loss.shape == () and close(loss.item(), expected), f"B = {batch} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。出発点（方策 = 参照方策）では、 $y_w$ の対数確率についての勾配は $-\beta/(2B)$ 、 $y_\ell$ については $+\beta/(2B)$ です。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
c, ref_c = [torch.tensor([-12.0, -7.0], requires_grad=True) for _ in range(2)]
r, ref_r = [torch.tensor([-15.0, -6.0], requires_grad=True) for _ in range(2)]
dpo_loss(c, r, ref_c, ref_r, beta=0.1).backward()

for logps in (c, r):
    assert logps.grad is not None, "方策に勾配が流れていません。"
for logps in (ref_c, ref_r):
    detached = logps.grad is None or not logps.grad.any()
    assert detached, "参照方策に勾配が流れています。"
for logps, expected in ((c, -0.025), (r, 0.025)):
    for grad in logps.grad.tolist():
        assert close(grad, expected), f"勾配は {expected} です。いまは {grad}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
c = torch.tensor([-12.0, -7.0], requires_grad=True)
r = torch.tensor([-15.0, -6.0], requires_grad=True)
dpo_loss(c, r, c, r, beta=0.1).backward()
for logps, expected in ((c, -0.025), (r, 0.025)):
    for grad in logps.grad.tolist():
        assert close(grad, expected), "参照方策の勾配が、方策の勾配を打ち消しています。"

c, r, ref_c, ref_r = random_logps(5, seed=21)
c.requires_grad_()
r.requires_grad_()
dpo_loss(c, r, ref_c, ref_r, 0.3).backward()
for i in range(5):
    m = 0.3 * ((c[i] - ref_c[i]) - (r[i] - ref_r[i])).item()
    weight = 0.3 / (1 + math.exp(m)) / 5
    assert close(c.grad[i].item(), -weight), f"βΔ = {m:.3f} で勾配が違います。"
    assert close(r.grad[i].item(), weight), f"βΔ = {m:.3f} で勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 最後に、極端な値です。 $\beta\Delta=-1000$ なら、損失はほぼ $1000$ になります。

# %% nbgrader={"grade": true, "grade_id": "test_stability", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
zero = torch.zeros(1)
value = dpo_loss(zero - 10000, zero, zero, zero, beta=0.1).item()
assert math.isfinite(value), (
    f"損失が {value} になりました。σ(-1000) は 0 に、exp(1000) は inf になります。"
    "σ と log を別々にではなく、log σ をまとめて計算しましょう。")
assert close(value, 1000.0, 1e-2), (
    f"{value:.3f} です。ほぼ 1000 のはずです。"
    "小さな数で下から押さえると、値も勾配も変わってしまいます。"
)
leaf = torch.tensor([-10000.0], requires_grad=True)
dpo_loss(leaf, zero, zero, zero, beta=0.1).backward()
slope = leaf.grad.item()
assert close(slope, -0.1), f"勾配は −β = −0.1 のはずですが、{slope} です。"
print("✓ 極端な値")
### BEGIN HIDDEN TESTS
for dtype in (torch.float32, torch.float64):
    for delta, expected, slope in ((-1e4, 1e3, -0.1), (-2e3, 200.0, -0.1), (1e4, 0.0, 0.0)):
        c = torch.tensor([delta], dtype=dtype, requires_grad=True)
        r, zero = torch.zeros(1, dtype=dtype, requires_grad=True), torch.zeros(1, dtype=dtype)
        loss = dpo_loss(c, r, zero, zero, 0.1)
        loss.backward()
        where = f"βΔ = {0.1 * delta}"
        assert close(loss.item(), expected, 1e-2), f"{where} で値が違います。"
        assert close(c.grad.item(), slope), f"{where} で勾配が違います。"
        assert close(r.grad.item(), -slope), f"{where} で勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた DPO の損失です。学習を始めると損失は $\log 2$ から出発し、少しずつ下がります。ただ、下がり方がどうも遅いようです。（大きな値での安定性は、ここでは問いません。）

# %% nbgrader={"grade": false, "grade_id": "buggy_dpo_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_dpo_loss(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
):
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)
    probability = torch.sigmoid(beta * (chosen_rewards - rejected_rewards))
    return -torch.log(probability).mean()


# %% [markdown]
# 正しい損失なら、次の 3 つがいつでも成り立ちます。1 対の損失を $\mathcal{L}(y_w,y_\ell)$ と書きます。
#
# 1. **出発点** 方策と参照方策が等しければ、 $\mathcal{L}(y_w,y_\ell)=\log 2$ です。
# 2. **入れ替え** $\sigma(m)/\sigma(-m)=e^m$ なので、好まれた回答と好まれなかった回答を入れ替えると、 $\mathcal{L}(y_w,y_\ell)-\mathcal{L}(y_\ell,y_w)=-\beta\Delta$ です。
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
        ("1 出発点　", start.item(), math.log(2)),
        ("2 入れ替え", (value - swapped).item(), (-beta * delta).item()),
        ("3 平行移動", shifted.item(), value.item()),
    ]


def show_identities(loss, beta):
    for name, left, right in identities(loss, beta):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_dpo_loss, beta=0.1)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# 成り立っていない恒等式の番号を `failed_identity` に、 $\beta=0.25$ のときにその左辺が右辺の何倍になるかを `ratio` に入れてください。何倍になるかは、誤りの正体を教えてくれます。 新しいセルを足して `show_identities(buggy_dpo_loss, beta=…)` を呼び、 `beta` を変えながら確かめてみましょう。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# ratio = 左辺 ÷ 右辺（β = 0.25 のとき）
### BEGIN SOLUTION
failed_identity = 2
_, left, right = identities(buggy_dpo_loss, beta=0.25)[failed_identity - 1]
ratio = left / right
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(ratio), "ratio には数を入れてください。"
assert not close(ratio, 1, 0.01), "1 倍なら、その恒等式は成り立っています。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
assert failed_identity == 2, "破れているのは別の恒等式です。"
assert close(ratio, 0.25, 0.005), "左辺が右辺の何倍かを、β = 0.25 で測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_dpo_loss` の誤りを直したものを `repaired_dpo_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_dpo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_dpo_loss(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
):
    ### BEGIN SOLUTION
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)
    probability = torch.sigmoid(chosen_rewards - rejected_rewards)
    return -torch.log(probability).mean()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for beta in (0.1, 0.25):
    for name, left, right in identities(repaired_dpo_loss, beta):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed, beta in ((31, 0.05), (32, 0.4)):
    c, r, ref_c, ref_r = random_logps(6, seed)
    m = (beta * ((c - ref_c) - (r - ref_r))).tolist()
    expected = sum(math.log1p(math.exp(-x)) for x in m) / 6
    assert close(repaired_dpo_loss(c, r, ref_c, ref_r, beta).item(), expected), (
        f"β = {beta} で値が違います。")
### END HIDDEN TESTS

# %% [markdown]
# 3 つの恒等式は、自分の `dpo_loss` を試すのにも使えます。次のセルは採点しません。

# %%
show_identities(dpo_loss, beta=0.25)

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# プロンプトは 1 つ、回答は A と B の 2 つだけという小さな世界を考えます。
#
# - 真の報酬は $r(\mathrm{A})=1,\ r(\mathrm{B})=0$ です。
# - 選好のラベルは Bradley–Terry モデルに従います。A が好まれる確率は $\sigma(r(\mathrm{A})-r(\mathrm{B}))\approx 0.73$ です。
# - 参照方策は $\pi_{\mathrm{ref}}(\mathrm{A})=0.2,\ \pi_{\mathrm{ref}}(\mathrm{B})=0.8$ 、 $\beta=0.5$ です。
#
# ### 3.1　予想する
#
# 選好データセットが無限に大きいとして、DPO の損失を最小にする方策 $\pi^*$ を考えます。計算機で学習する前に、紙と鉛筆で次の 2 つを求めてください。式（`math.exp` など）で書いても、数で書いても構いません。
#
# - `predicted_gap` ：2 つの対数確率比の差 $\displaystyle\log\frac{\pi^*(\mathrm{A})}{\pi_{\mathrm{ref}}(\mathrm{A})}-\log\frac{\pi^*(\mathrm{B})}{\pi_{\mathrm{ref}}(\mathrm{B})}$
# - `predicted_prob` ：確率 $\pi^*(\mathrm{A})$ （四捨五入して小数第 2 位まで合っていれば正解です）

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_gap = 対数確率比の差
# predicted_prob = A の確率
### BEGIN SOLUTION
predicted_gap = (1 - 0) / 0.5
predicted_prob = 0.2 * math.exp(1 / 0.5) / (0.2 * math.exp(1 / 0.5) + 0.8 * math.exp(0 / 0.5))
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_gap", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
gap = predicted_gap
assert not close(gap, 1.0, 0.005), "β の影響を忘れていませんか。"
assert not close(gap, 0.5, 0.005), "β が小さいほど、遠くへ離れられます。"
assert not close(gap, 0.61, 0.01), "対数確率ではなく、対数確率比の差です。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_gap, 2.0, 0.01), "対数確率比の差の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_prob", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
p = predicted_prob
assert 0 < p < 1, "確率は 0 と 1 のあいだの数です。"
assert not close(p, 0.731, 0.005), "好まれる確率と、方策の確率は別です。"
assert not close(p, 0.881, 0.005), "参照方策を忘れていませんか。"
assert not close(p, 0.405, 0.005), "β の影響を忘れていませんか。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_prob, 0.6488, 0.006), "A の確率の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 勾配法で実際に学習します。ラベルは確率的なので、 `win` の確率で A が、 $1-$ `win` の確率で B が好まれた回答になります。データが無限にあるときの損失、つまり式 (4.19) の期待値そのものを `loss` に書いてください。問 1 の `dpo_loss` を使っても、式を直接書いても構いません。

# %% nbgrader={"grade": false, "grade_id": "trained_policy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trained_policy(rewards, ref_probs, beta, steps=200):
    """期待損失を勾配法で最小にした方策の確率 (2,) を返す。回答は A、B の順"""
    win = 1 / (1 + math.exp(rewards[1] - rewards[0]))  # A が好まれる確率
    ref_logps = torch.tensor(ref_probs, dtype=torch.float64).log()
    logits = ref_logps.clone().requires_grad_()  # 参照方策から出発します
    # 勾配は β² に比例して小さくなるので、その分だけ学習率を大きくします
    optimizer = torch.optim.SGD([logits], lr=2 / beta**2)
    for _ in range(steps):
        logps = logits.log_softmax(0)
        ### BEGIN SOLUTION
        a, b, ref_a, ref_b = logps[:1], logps[1:], ref_logps[:1], ref_logps[1:]
        a_wins = dpo_loss(a, b, ref_a, ref_b, beta)
        b_wins = dpo_loss(b, a, ref_b, ref_a, beta)
        loss = win * a_wins + (1 - win) * b_wins
        ### END SOLUTION
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return logits.softmax(0).detach()


# %% nbgrader={"grade": true, "grade_id": "test_trained_policy", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
measured = trained_policy(rewards=(1.0, 0.0), ref_probs=(0.2, 0.8), beta=0.5)
assert measured.shape == (2,), "2 つの回答の確率を返してください。"
assert close(measured.sum().item(), 1), "確率の和が 1 になりません。"
assert measured[0] < 0.99, "B が好まれる場合も損失に入っていますか。"
assert measured[0] > 0.21, "A の確率が増えていません。向きを確かめましょう。"
print("✓ 学習できました")
### BEGIN HIDDEN TESTS
for rewards, ref_probs, beta in (
    ((1.0, 0.0), (0.2, 0.8), 0.5),
    ((0.5, 2.0), (0.7, 0.3), 0.3),
    ((0.4, 0.4), (0.6, 0.4), 1.0),
):
    odds = ref_probs[0] / ref_probs[1] * math.exp((rewards[0] - rewards[1]) / beta)
    value = trained_policy(rewards, ref_probs, beta)[0].item()
    assert close(value, odds / (1 + odds), 1e-4), f"r = {rewards}、β = {beta} で行き先が違います。"
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
# 3 つの回答を持つ小さな方策を、1 対の選好データだけで学習します。3 つの回答の対数確率は、2 つのパラメータを通じて互いにつながっています。参照方策は一様分布です。更新の大きさは、式 (4.19) を微分すると現れる重み $\beta\,\sigma(-\beta\Delta)$ で決めます。

# %% nbgrader={"grade": false, "grade_id": "one_pair_training", "locked": true, "schema_version": 3, "solution": false, "task": false}
features = torch.tensor([
    [1.0, 0.5],    # 好まれた回答
    [2.0, 0.0],    # 好まれなかった回答
    [-3.0, -0.5],  # 対に現れない回答
])
direction = features[0] - features[1]  # マージンを増やす向き
theta, beta = torch.zeros(2), 0.1
history = {"chosen": [], "rejected": [], "margin": []}
for _ in range(100):
    logps = (features @ theta).log_softmax(0)
    margin = beta * (logps[0] - logps[1])
    history["chosen"].append(logps[0].item())
    history["rejected"].append(logps[1].item())
    history["margin"].append(margin.item())
    theta = theta + 0.2 * beta * torch.sigmoid(-margin) * direction

# %% nbgrader={"grade": false, "grade_id": "one_pair_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
curves(history, {
    "対数確率": {"好まれた回答": "chosen", "好まれなかった回答": "rejected"},
    "マージン $\\beta\\Delta$": "margin",
})

# %% [markdown]
# 右の図ではマージンが増えているので、損失は減っています。ところが左の図では、好まれた回答の対数確率まで下がっています。次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - 好まれた回答の対数確率が下がってもマージンが増えうるのはなぜか
# - 減った分の確率はどこへ移ったか
# - 自分の学習でこれに気づくには、図に何を描けばよいか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 式 (4.19) の損失は、2 つの対数確率比の差 $\Delta$ だけで決まります。問 2 の「平行移動」の通り、両方の対数確率が同じだけ下がっても損失は変わりません。そのため、好まれなかった回答がもっと大きく下がりさえすれば、好まれた回答が下がってもマージンは増えます。この例では2 つの回答の特徴が似ていて、しかも好まれなかった回答の特徴のほうが大きいので、一方を下げる更新がもう一方も巻き込みます。（回答ごとに独立したパラメータを持つ表形式の方策では、これは起きません。）確率の和は 1 なので、減った分は対に現れない3 つ目の回答へ移っています。気づくには、マージンや精度だけでなく、好まれた回答と好まれなかった回答の対数確率を別々の曲線として描きます。TRL のログでは `logps/chosen` と `logps/rejected` です。学習後の方策から回答を生成してみるのも確実です。
#
# **採点の目安** 差だけで決まること（1 点）、対に現れない回答へ移ること（1 点）、2 つの対数確率を分けて描くこと（1 点）。
