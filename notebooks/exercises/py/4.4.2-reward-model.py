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
# # 演習 4.4.2 報酬モデル
#
# 式 (4.8) の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、学習の行き先を先に言い当ててから測ります。4.4.2 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | 点数を読み、損失関数を実装する | 9 |
# | 2 | 恒等式で誤りを見つけて直す | 4 |
# | 3 | 数を予想してから測る | 4 |
# | 4 | 言葉で説明する | 3 |
#
# **進め方** 上のセルから順に実行してください。解答するのは「ここに…書いてください」とあるセルだけです。 `raise NotImplementedError` の行は消して、そこにコードを書きます。その下のテストのセルを実行すると、合っていれば ✓ が出て、違っていればどこを見直せばよいかが出ます。採点では、ここに見えているもののほかに、別の数値でのテストも行います。
#
# ## 記号
#
# | 記号 | 意味 | 変数 | 形状 |
# |---|---|---|---|
# | $y_w, y_\ell$ | 好まれた回答、好まれなかった回答 | `chosen`, `rejected` | – |
# | – | すべての位置の点数 | `token_scores` | (B, T) |
# | – | 注意マスク（パディングで 0） | `mask` | (B, T) |
# | $r_\phi(x,y_w),\ r_\phi(x,y_\ell)$ | 報酬モデルの点数 | `rewards_chosen`, `rewards_rejected` | (B,) |

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
from companion.notebook import setup

setup(seed=0)

# %% nbgrader={"grade": false, "grade_id": "imports", "locked": true, "schema_version": 3, "solution": false, "task": false}
import math
import warnings

import torch

warnings.simplefilter("ignore")  # 自動採点は警告の表示も誤りと数えるため


def close(value, expected, tol=1e-6):
    return abs(value - expected) <= tol


def random_rewards(batch, seed):
    """好まれた回答と、好まれなかった回答の点数、形状 (B,)"""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, batch, generator=generator, dtype=torch.float64)
    return list(3 * rows)


def hint_for(value, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if close(value, wrong):
            return hint
    return otherwise


# %% [markdown]
# ## 問 1　点数を読み、損失関数を実装する（9 点）
#
# 本書の式 (4.8) は次の通りです。
#
# $$
# \mathcal{L}_{\mathrm{RM}}(\phi)
# =-\mathbb{E}_{(x,y_w,y_\ell)\sim\mathcal{D}_{\mathrm{HF}}}
# \left[\log\sigma\left(r_\phi(x,y_w)-r_\phi(x,y_\ell)\right)\right]
# \tag{4.8}
# $$
#
# ### 1.1　点数を読む
#
# 報酬モデルは、系列のすべての位置で点数を計算します。回答の点数 $r_\phi(x,y)$ は、そのうち、 **最後の本物のトークン** （パディングでないトークン）の位置の値です。
# パディングは、右にあることも、左にあることもあります。どちらでも正しく読めるように書いてください。

# %% nbgrader={"grade": false, "grade_id": "last_scores", "locked": false, "schema_version": 3, "solution": true, "task": false}
def last_scores(token_scores, mask):
    """すべての位置の点数とマスク (B, T) から、回答の点数 (B,) を返す"""
    ### BEGIN SOLUTION
    positions = torch.arange(mask.shape[1])
    last = (positions * (mask != 0)).argmax(-1)
    return token_scores.gather(-1, last[:, None]).squeeze(-1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_last_scores", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
token_scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
result = last_scores(token_scores, mask)

shape = tuple(result.shape)
assert shape == (2,), f"形状は (B,) = (2,) です。いまは {shape} です。"
hints = {
    (4.0, 8.0): "パディングの位置を読んでいるようです。",
    (3.0, 5.0): "最後の本物のトークンより、1 つ手前を読んでいるようです。",
    (10.0, 11.0): "合計ではありません。最後のトークンの値です。",
    (2.5, 5.5): "平均ではありません。最後のトークンの値です。",
    (1.0, 5.0): "最初のトークンを読んでいるようです。",
}
values = tuple(round(v, 6) for v in result.tolist())
hint = hints.get(values, "値が違います。")
assert values == (4.0, 6.0), f"{hint}（あなたの値 {values}）"

left = last_scores(token_scores, torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]]))
assert left.tolist() == [4.0, 8.0], "左にパディングがあるときの値が違います。"
print("✓ 点数を読む位置")
### BEGIN HIDDEN TESTS
generator = torch.Generator().manual_seed(11)
token_scores = torch.randn(4, 6, generator=generator, dtype=torch.float64)
where = torch.arange(6)
mask = torch.stack([where < 4, where >= 2, (where >= 1) & (where < 4), where < 1]).long()
result = last_scores(token_scores, mask)
for i, last in enumerate((3, 5, 3, 0)):
    assert close(result[i].item(), token_scores[i, last].item()), "読む位置が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　損失関数
#
# 形状 (B,) の 2 つの点数から、式 (4.8) の損失を計算してください。期待値はミニバッチの平均で置き換えます。
# 点数の差は大きな値にもなります。 $\pm 1000$ でも、損失と勾配が `inf` や `nan` にならないように書きましょう。

# %% nbgrader={"grade": false, "grade_id": "reward_model_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def reward_model_loss(rewards_chosen, rewards_rejected):
    """式 (4.8) の損失（スカラー）を返す。点数はどちらも形状 (B,)"""
    ### BEGIN SOLUTION
    margin = rewards_chosen - rewards_rejected
    return -torch.nn.functional.logsigmoid(margin).mean()
    ### END SOLUTION


# %% [markdown]
# はじめは、手で計算できる 1 対です。点数は $y_w$ が $3$ 、 $y_\ell$ が $2$ です。

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
chosen, rejected = torch.tensor([3.0]), torch.tensor([2.0])
loss = reward_model_loss(chosen.double(), rejected.double())
assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"

hints = {
    -0.313262: "損失の符号が逆のようです。負の対数なので、損失は正の数です。",
    1.313262: "y_w と y_ℓ が入れ替わっているか、σ の中の符号が逆のようです。",
    0.006715: "2 つの点数を、引かずに足しているようです。",
    -0.731059: "σ の対数をとっていないようです。",
    0.268941: "σ の対数をとっていないようです。",
    -1.0: "σ を通していないようです。",
    -0.071777: "σ に通してから引いているようです。差をとるのが先です。",
    0.048587: "好まれなかった回答の点数が使われていないようです。",
}
value = loss.item()
hint = hint_for(value, hints, "式と見比べてみましょう。")
assert close(value, 0.313262), f"{hint}（{value:.6f}、正しくは 0.313262）"

tie = reward_model_loss(torch.zeros(1), torch.zeros(1)).item()
assert close(tie, math.log(2)), "点数が等しければ log 2 です。"
print("✓ 1 対の値")
### BEGIN HIDDEN TESTS
for seed in range(4):
    chosen, rejected = random_rewards(1, seed)
    m = (chosen - rejected).item()
    expected = max(-m, 0.0) + math.log1p(math.exp(-abs(m)))
    value = reward_model_loss(chosen, rejected).item()
    assert close(value, expected), f"差 {m:.3f} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、3 対からなるミニバッチです。点数の差は $(2,0,-1)$ です。

# %% nbgrader={"grade": true, "grade_id": "test_batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
margins = torch.tensor([2.0, 0.0, -1.0]).double()
value = reward_model_loss(margins + 5, torch.full((3,), 5.0).double()).item()

hints = {
    2.133337: "ミニバッチの合計になっているようです。平均にしましょう。",
    0.540306: "平均をとるのは σ の対数をとったあとです。順序が逆のようです。",
}
hint = hint_for(value, hints, "対ごとの値を平均します。")
assert close(value, 0.711112), f"{hint}（{value:.6f}、正しくは 0.711112）"
print("✓ ミニバッチの平均")
### BEGIN HIDDEN TESTS
for batch in (2, 5, 8):
    chosen, rejected = random_rewards(batch, seed=batch)
    ms = (chosen - rejected).tolist()
    expected = sum(max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in ms) / batch
    loss = reward_model_loss(chosen, rejected)
    assert loss.shape == () and close(loss.item(), expected), f"B = {batch} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。点数が等しい 2 対なら、好まれた側の勾配は $-\frac14$ 、好まれなかった側は $+\frac14$ です。
# どちらの点数も、同じ報酬モデルの出力です。両方に勾配が流れなければなりません。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
chosen = torch.zeros(2, requires_grad=True)
rejected = torch.zeros(2, requires_grad=True)
reward_model_loss(chosen, rejected).backward()

for rewards, side in ((chosen, "好まれた"), (rejected, "好まれなかった")):
    assert rewards.grad is not None, f"{side}側に勾配が流れていません。"
for rewards, expected in ((chosen, -0.25), (rejected, 0.25)):
    for grad in rewards.grad.tolist():
        assert close(grad, expected), f"勾配は {expected} です。いまは {grad}"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
chosen, rejected = random_rewards(5, seed=21)
chosen.requires_grad_()
rejected.requires_grad_()
reward_model_loss(chosen, rejected).backward()
for i in range(5):
    m = (chosen[i] - rejected[i]).item()
    weight = 1 / (1 + math.exp(m)) / 5
    assert chosen.grad is not None and rejected.grad is not None, "勾配が流れていません。"
    assert close(chosen.grad[i].item(), -weight), f"差 {m:.3f} で勾配が違います。"
    assert close(rejected.grad[i].item(), weight), f"差 {m:.3f} で勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 最後に、極端な値です。差が $-1000$ なら、損失はほぼ $1000$ になります。

# %% nbgrader={"grade": true, "grade_id": "test_stability", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
chosen = torch.tensor([-1000.0], requires_grad=True)
loss = reward_model_loss(chosen, torch.zeros(1))
value = loss.item()
assert math.isfinite(value), (
    f"損失が {value} になりました。σ(-1000) は 0 に、exp(1000) は inf になります。"
    "σ と log を別々にではなく、log σ をまとめて計算しましょう。")
assert close(value, 1000.0, 1e-2), (
    f"{value:.3f} です。ほぼ 1000 のはずです。"
    "小さな数で下から押さえると、値も勾配も変わってしまいます。"
)
loss.backward()
slope = chosen.grad.item()
assert close(slope, -1.0), f"勾配は −1 のはずですが、{slope} です。"
print("✓ 極端な値")
### BEGIN HIDDEN TESTS
for dtype in (torch.float32, torch.float64):
    for m, expected, slope in ((-1e3, 1e3, -1.0), (-200.0, 200.0, -1.0), (1e3, 0.0, 0.0)):
        chosen = torch.tensor([m], dtype=dtype, requires_grad=True)
        rejected = torch.zeros(1, dtype=dtype, requires_grad=True)
        loss = reward_model_loss(chosen, rejected)
        loss.backward()
        where = f"差 {m}"
        assert close(loss.item(), expected, 1e-2), f"{where} で値が違います。"
        assert close(chosen.grad.item(), slope), f"{where} で勾配が違います。"
        assert close(rejected.grad.item(), -slope), f"{where} で勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた報酬モデルの損失です。点数が大きくなりすぎないように、という工夫がしてあります。点数をすべて 0 にして学習を始めると、損失は $\log 2$ から出発し、少しずつ下がります。（大きな値での安定性は、ここでは問いません。）

# %% nbgrader={"grade": false, "grade_id": "buggy_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_loss(rewards_chosen, rewards_rejected):
    scale = 1 + (rewards_chosen + rewards_rejected).abs() / 10
    probability = torch.sigmoid((rewards_chosen - rewards_rejected) / scale)
    return -torch.log(probability).mean()


# %% [markdown]
# 正しい損失なら、次の 3 つがいつでも成り立ちます。1 対の損失を $\mathcal{L}(r_w,r_\ell)$ と書きます。
#
# 1. **引き分け** 点数が等しければ、 $\mathcal{L}(r,r)=\log 2$ です。
# 2. **確率の和** どちらかは好まれるので、 $e^{-\mathcal{L}(r_w,r_\ell)}+e^{-\mathcal{L}(r_\ell,r_w)}=1$ です。
# 3. **平行移動** 両方の点数に同じ数 $c$ を足しても、 $\mathcal{L}(r_w,r_\ell)$ は変わりません。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, shift):
    """3 つの恒等式の名前、左辺、右辺"""
    chosen = torch.tensor([2.5]).double()
    rejected = torch.tensor([0.5]).double()
    value = loss(chosen, rejected)
    both = (-value).exp() + (-loss(rejected, chosen)).exp()
    moved = loss(chosen + shift, rejected + shift)
    return [
        ("1 引き分け", loss(chosen, chosen).item(), math.log(2)),
        ("2 確率の和", both.item(), 1.0),
        ("3 平行移動", moved.item(), value.item()),
    ]


def show_identities(loss, shift):
    for name, left, right in identities(loss, shift):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_loss, shift=0.0)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# $c=0$ では、3 つとも成り立っているように見えます。新しいセルを足して `show_identities(buggy_loss, shift=…)` を呼び、 `shift` を変えながら調べてください。
# 成り立っていない恒等式の番号を `failed_identity` に、 `shift` $=3.5$ のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（shift = 3.5 のとき）
### BEGIN SOLUTION
failed_identity = 3
left_side = identities(buggy_loss, shift=3.5)[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
assert failed_identity == 3, "破れているのは別の恒等式です。"
assert close(left_side, math.log1p(math.exp(-1)), 0.005), "shift = 3.5 で測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_loss` の誤りを直したものを `repaired_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_loss(rewards_chosen, rewards_rejected):
    ### BEGIN SOLUTION
    probability = torch.sigmoid(rewards_chosen - rewards_rejected)
    return -torch.log(probability).mean()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for shift in (-4.0, 0.0, 3.5):
    for name, left, right in identities(repaired_loss, shift):
        assert close(left, right), f"「{name}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed in (31, 32):
    chosen, rejected = random_rewards(6, seed)
    ms = (chosen - rejected).tolist()
    expected = sum(math.log1p(math.exp(-m)) for m in ms) / 6
    assert close(repaired_loss(chosen, rejected).item(), expected), "値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（4 点）
#
# プロンプトは 1 つ、回答は A、B、C の 3 つです。報酬モデルは、回答ごとに点数を一つ持つ表で、初期値はどれも 0 です。集まったデータは、次の 20 対でした。
#
# | 比べた回答 | 対の数 | 結果 |
# |---|---|---|
# | A と B | 10 | A が 8 回好まれた |
# | B と C | 10 | B が 5 回好まれた |
#
# ### 3.1　予想する
#
# A と C は、一度も比べられていません。それでも、損失が最小になる報酬モデルは、A と C についても予測をします。計算機で学習する前に、次の 2 つを求めてください。式（`math.log` など）で書いても、数で書いても構いません。
#
# - `predicted_gap` ：点数の差 $r(\mathrm{A})-r(\mathrm{B})$
# - `predicted_prob` ：A が C より好まれる確率の予測 $\widehat P(\mathrm{A}\succ\mathrm{C})$

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_gap = 点数の差
# predicted_prob = A が C より好まれる確率
### BEGIN SOLUTION
predicted_gap = math.log(8 / 2)
predicted_prob = 8 / 10
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predictions", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
gap, p = predicted_gap, predicted_prob
assert not close(gap, 0.8, 0.005), "それは確率です。点数の差は、確率ではありません。"
assert not close(gap, math.log(0.8), 0.005), "σ の逆関数は、log p ではありません。"
assert gap > 0, "A のほうが多く好まれています。"
assert 0 < p < 1, "確率は 0 と 1 のあいだの数です。"
assert not close(p, 0.5, 0.005), "B との比較を通じて、A と C はつながっています。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_gap, math.log(4), 0.01), "点数の差の予想が違います。"
assert close(predicted_prob, 0.8, 0.005), "確率の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 勾配法で実際に学習します。 `wins[i][j]` は、回答 $i$ が回答 $j$ より好まれた回数です。すべての対についての式 (4.8) の損失（平均）を `loss` に書いてください。問 1 の `reward_model_loss` を使っても、式を直接書いても構いません。

# %% nbgrader={"grade": false, "grade_id": "trained_rewards", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trained_rewards(wins, steps=500):
    """wins (K, K) から、損失を勾配法で最小にした点数 (K,) を返す"""
    rewards = torch.zeros(len(wins), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([rewards], lr=2.0)
    for _ in range(steps):
        ### BEGIN SOLUTION
        pairs = [
            (i, j)
            for i, row in enumerate(wins)
            for j, count in enumerate(row)
            for _ in range(count)
        ]
        winners, losers = map(list, zip(*pairs, strict=True))
        loss = reward_model_loss(rewards[winners], rewards[losers])
        ### END SOLUTION
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rewards.detach()


# %% nbgrader={"grade": true, "grade_id": "test_trained_rewards", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
measured = trained_rewards([[0, 8, 0], [2, 0, 5], [0, 5, 0]])
assert measured.shape == (3,), "3 つの回答の点数を返してください。"
assert measured[0] > measured[1], "A は B より多く好まれています。"
assert measured[0] - measured[1] < 3, "A が負けた 2 回も損失に入っていますか。"
print("✓ 学習できました")
### BEGIN HIDDEN TESTS
for wins, gaps in (
    ([[0, 8, 0], [2, 0, 5], [0, 5, 0]], (math.log(4), 0.0)),
    ([[0, 3, 0], [6, 0, 4], [0, 2, 0]], (-math.log(2), math.log(2))),
):
    value = trained_rewards(wins)
    for i, expected in enumerate(gaps):
        assert close((value[i] - value[i + 1]).item(), expected, 1e-3), "行き先が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
gap = (measured[0] - measured[1]).item()
p = torch.sigmoid(measured[0] - measured[2]).item()
print(f"点数の差             予想 {predicted_gap:.4f}   測定 {gap:.4f}")
print(f"A が C より好まれる  予想 {predicted_prob:.4f}   測定 {p:.4f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# ある人が、報酬モデルを学習させました。学習していない対での正解率は 0.9 です。そこで、言語モデルに 1,000 個の回答を書かせ、報酬モデルの点数が一番高いものを採用することにしました。ところが、選ばれた回答を人が読むと、1 個だけ書かせたときより悪いのです。次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - 対での正解率が高いことと、一番高い点数の回答がよいことは、なぜ違うのか
# - どのような回答の点数が、とくに信用できないか
# - これに気づく、あるいは避けるには、どうすればよいか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 正解率は、データに出てくるような回答の対についての平均です。1,000 個の中の一番を選ぶと、真の報酬が高い回答だけでなく、報酬モデルがたまたま高く付け間違えた回答も選ばれます。数を増やすほど、めったに出ない、大きな付け間違いが混ざりやすくなります。とくに信用できないのは、参照方策がめったに書かず、比べられた回数の少ない回答です。数回勝っただけで、点数はいくらでも高くなれるからです。気づくには、選ぶ数 n を変えながら、選ばれた回答の真の報酬（人の評価や正解率）を測ります。避けるには、n を小さくする、KL の正則化で参照方策の近くにとどめる、選ばれた回答を新しく比べてデータに加える、などの方法があります。
#
# **採点の目安** 平均と最大の違い（1 点）、比べられることの少ない回答（1 点）、測り方または避け方（1 点）。
