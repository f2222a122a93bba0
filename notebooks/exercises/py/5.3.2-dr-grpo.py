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
# # 演習 5.3.2 Dr. GRPO
#
# Dr. GRPO のアドバンテージと損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、勾配の期待値を先に言い当ててから数え上げます。5.3.2 節を読み終えた方に向けた演習です。
#
# | 問 | 内容 | 配点 |
# |---|---|---|
# | 1 | アドバンテージと損失関数を実装する | 8 |
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
# | $G$ | グループの大きさ | `group_size` | – |
# | $r_i$ | 報酬（同じグループの行は続けて並ぶ） | `rewards` | (B,) |
# | $\widehat A^{\mathrm{Dr}}_i$ | アドバンテージ | `advantages` | (B,) |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}}$ | トークンの対数確率 | `logps`, `old_logps` | (B, T) |
# | $\lvert y_i\rvert$ | 回答の長さ。 `mask` は回答のトークンで 1、詰め物で 0 | `mask.sum(-1)` | (B,) |
# | $\epsilon$ | クリッピングの幅 | `epsilon` | – |
# | $L$ | TRL が損失をさらに割る定数 | `max_completion_length` | – |

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
def mask_of(lengths, width):
    """長さのリストから、マスク (B, width) を作る"""
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).double()


def random_batch(lengths, width, seed):
    """対数確率 (B, width)、古い対数確率 (B, width)、アドバンテージ (B,)、マスク"""
    g = torch.Generator().manual_seed(seed)
    shape = len(lengths), width
    logps = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    old = logps + 0.5 * torch.randn(shape, generator=g, dtype=torch.float64)
    advantages = torch.randn(shape[0], generator=g, dtype=torch.float64)
    return logps, old, advantages, mask_of(lengths, width)


# %% [markdown]
# ## 問 1　アドバンテージと損失関数を実装する（8 点）
#
# ### 1.1　アドバンテージ
#
# 式 (5.10) です。グループの平均だけを引き、標準偏差では割りません。
#
# $$
# \widehat A^{\mathrm{Dr}}_i=r_i-\frac1G\sum_{j=1}^{G}r_j
# $$
#
# 行は、はじめの $G$ 行が 1 つ目のグループ、次の $G$ 行が 2 つ目のグループ、…と並んでいます。比べる相手がいない $G<2$ では、 `ValueError` を起こしてください。

# %% nbgrader={"grade": false, "grade_id": "group_advantages", "locked": false, "schema_version": 3, "solution": true, "task": false}
def group_advantages(rewards, group_size):
    """報酬 (B,) から、アドバンテージ (B,) を返す"""
    ### BEGIN SOLUTION
    if group_size < 2:
        raise ValueError("グループには、2 つ以上の回答が必要です")
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(-1, keepdim=True)).flatten()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_advantages", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]).double()
A = group_advantages(rewards, 4)
assert isinstance(A, torch.Tensor), "torch のテンソルを返しましょう。"
assert A.shape == (8,), f"形状は (8,) です。いまは {tuple(A.shape)} です。"
hints = {
    0.5: "全部の行の平均を引いているようです。グループごとに引きます。",
    1.4997: "標準偏差で割っているようです。Dr. GRPO では割りません。",
    1.5: "標準偏差で割っているようです。Dr. GRPO では割りません。",
    1.0: "自分を除いた平均（RLOO）を引いたか、何も引いていないようです。"
         "自分も入れた平均を引きます。",
    -0.75: "引き算の向きが逆です。",
    0.25: "行の並びが違うようです。続けて並んだ G 行が 1 つのグループです。",
}
hint = hint_for(A[0].item(), hints, "式と見比べてみましょう。")
assert close(A[0].item(), 0.75, 1e-9), f"{hint}（{A[0]:.4f}、正しくは 0.75）"
expected = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
assert torch.allclose(A, torch.tensor(expected).double()), f"{A.tolist()}"
try:
    group_advantages(rewards[:1], 1)
except ValueError:
    print("✓ アドバンテージ")
else:
    raise AssertionError("G = 1 のときは ValueError を起こしましょう。")
### BEGIN HIDDEN TESTS
for size in (2, 3, 5):
    r = torch.arange(3.0 * size).double() ** 1.5 - 2
    A = group_advantages(r, size)
    assert A.shape == r.shape, "形状が違います。"
    for i in range(3 * size):
        first = i - i % size
        mine = r[i] - sum(r[first:first + size].tolist()) / size
        assert close(A[i].item(), mine.item()), f"G = {size} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　損失
#
# 式 (5.11)・(5.12) の符号を変え、TRL と同じように、さらに定数 $L$ で割ります（ $L=1$ なら式のとおりです）。
#
# $$
# \mathcal{L}=-\frac{1}{B\,L}\sum_{i=1}^{B}\sum_{t=1}^{|y_i|}\min\Bigl\{w_{i,t}\widehat A_i,\ \mathrm{clip}(w_{i,t},1-\epsilon,1+\epsilon)\,\widehat A_i\Bigr\},\qquad
# w_{i,t}=\frac{\pi_\theta(y_{i,t}\mid x,y_{i,<t})}{\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})}
# $$
#
# 古い対数確率とアドバンテージはデータとして扱い、勾配を流しません。詰め物のところには、NaN が入っているかもしれません。値にも勾配にも、混ざらないようにしてください。

# %% nbgrader={"grade": false, "grade_id": "dr_grpo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def dr_grpo_loss(
    logps, old_logps, advantages, mask, epsilon, max_completion_length
):
    """Dr. GRPO の損失（スカラー）を返す"""
    ### BEGIN SOLUTION
    real = mask.bool()
    log_ratio = torch.where(real, logps - old_logps.detach(), 0.0)
    ratio = log_ratio.exp()
    A = advantages.detach()[:, None]
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    objective = torch.where(real, torch.minimum(ratio * A, clipped * A), 0.0)
    return -objective.sum() / (len(logps) * max_completion_length)
    ### END SOLUTION


# %% [markdown]
# はじめは、比が 1 のとき。アドバンテージは $+1$ と $-1$、長さは 2 と 8、バッチの幅は 9 です。

# %% nbgrader={"grade": false, "grade_id": "two_and_eight", "locked": true, "schema_version": 3, "solution": false, "task": false}
plus_minus = torch.tensor([1.0, -1.0]).double()
zeros, two_eight = torch.zeros(2, 9).double(), mask_of([2, 8], 9)

# %% nbgrader={"grade": true, "grade_id": "test_value", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
loss = dr_grpo_loss(zeros, zeros, plus_minus, two_eight, 0.2, 10)
assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
assert loss.shape == (), "損失はスカラーです。"
hints = {
    0.0: "回答ごとに長さで割っているようです。トークンについて足します。",
    0.6: "B で割っていないか、トークンの数で割っているようです。",
    1 / 3: "バッチの幅で割っているようです。割るのは定数 L です。",
    3.0: "max_completion_length で割っていないようです。",
    -0.3: "符号が逆です。損失は、目的関数の符号を変えたものです。",
}
hint = hint_for(loss.item(), hints, "式と見比べてみましょう。")
assert close(loss.item(), 0.3), f"{hint}（{loss.item():.6f}、正しくは 0.3）"
loss = dr_grpo_loss(zeros, zeros, plus_minus, two_eight, 0.2, 1).item()
assert close(loss, 3.0), f"L = 1 なら 3 です。いまは {loss:.6f}"
print("✓ 比が 1 のときの値")
### BEGIN HIDDEN TESTS
for seed, lengths in enumerate([[3, 1, 5, 2], [1, 1], [4, 2, 6, 6, 1, 3]]):
    for L in (1, 7, 512):
        logps, _, A, mask = random_batch(lengths, 7, seed)
        expected = -sum(a * n for a, n in zip(A.tolist(), lengths, strict=True))
        value = dr_grpo_loss(logps, logps, A, mask, 0.2, L)
        assert value.shape == (), "損失はスカラーです。"
        assert close(value.item() * L, expected / len(lengths)), f"L = {L} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は、クリッピングの 4 つの場合です。 $\epsilon=0.2$ とします。

# %% nbgrader={"grade": true, "grade_id": "test_clip", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
one, zero = torch.ones(1, 1), torch.zeros(1, 1).double()
for w, a, expected in ((1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, 1, -0.5),
                       (0.5, -1, 0.8), (1.1, 1, -1.1)):
    log_w = torch.tensor([[math.log(w)]]).double()
    value = dr_grpo_loss(log_w, zero, torch.tensor([float(a)]).double(),
                         one, 0.2, 1).item()
    hints = {-w * a: "クリップされていないようです。",
             -min(max(w, 0.8), 1.2) * a: "min ではなく、いつもクリップしているようです。"}
    hint = hint_for(value, hints, "clip と min を見直しましょう。")
    assert close(value, expected), (
        f"w = {w}、A = {a:+d}: {hint}（{value:.4f}、正しくは {expected}）")
print("✓ クリッピング")
### BEGIN HIDDEN TESTS
for seed, epsilon in enumerate((0.05, 0.2, 0.5)):
    lengths = [3, 1, 5, 2]
    logps, old, A, mask = random_batch(lengths, 6, seed + 10)
    total = 0.0
    for i, n in enumerate(lengths):
        for t in range(n):
            w = math.exp((logps - old)[i, t].item())
            a = A[i].item()
            total += min(w * a, min(max(w, 1 - epsilon), 1 + epsilon) * a)
    value = dr_grpo_loss(logps, old, A, mask, epsilon, 3).item()
    assert close(value, -total / 12), f"ε = {epsilon} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 詰め物のところは、幅を広げても、NaN が入っていても、損失に影響しません。

# %% nbgrader={"grade": true, "grade_id": "test_mask", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
logps, old, A, mask = random_batch([3, 1, 5, 2], 5, seed=1)
narrow = dr_grpo_loss(logps, old, A, mask, 0.2, 5).item()
filler = torch.full((4, 6), math.nan).double()
wide = [torch.cat([table, filler], 1) for table in (logps, old)]
wide_mask = torch.cat([mask, torch.zeros(4, 6)], 1)
value = dr_grpo_loss(*wide, A, wide_mask, 0.2, 5).item()
assert not math.isnan(value), "詰め物の NaN が損失に混ざっています。"
assert close(value, narrow), "詰め物を増やすと、損失が変わってしまいます。"
nothing = dr_grpo_loss(logps, old, A, torch.zeros(4, 5), 0.2, 5).item()
assert close(nothing, 0.0), "トークンが一つもなければ、損失は 0 です。"
print("✓ マスク")
### BEGIN HIDDEN TESTS
for seed, lengths in ((2, [2, 2]), (3, [1, 4, 2, 3, 5, 1])):
    logps, old, A, mask = random_batch(lengths, 8, seed)
    value = dr_grpo_loss(logps, old, A, mask, 0.2, 8).item()
    for fill in (math.nan, math.inf, 1e6):
        broken = [torch.where(mask > 0, table, fill) for table in (logps, old)]
        broken[0].requires_grad_()
        loss = dr_grpo_loss(*broken, A, mask, 0.2, 8)
        assert close(loss.item(), value), "詰め物の値が損失に混ざっています。"
        loss.backward()
        assert torch.isfinite(broken[0].grad).all(), "詰め物の値が勾配に混ざっています。"
    half = mask * torch.tensor([[1.0]] + [[0.0]] * (len(lengths) - 1))  # 残りは空の回答
    value = dr_grpo_loss(logps, logps, A, half, 0.2, 8).item()
    assert close(value, -A[0].item() * lengths[0] / (8 * len(lengths))), "空の回答も B に数えます。"
### END HIDDEN TESTS

# %% [markdown]
# 勾配を確かめます。比が 1 なら、トークンごとの勾配は $-\widehat A_i/(BL)$ で、回答の長さによりません。

# %% nbgrader={"grade": true, "grade_id": "test_gradient", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
logps = torch.zeros(2, 9).double().requires_grad_()
old = torch.zeros(2, 9).double().requires_grad_()
A = plus_minus.clone().requires_grad_()
dr_grpo_loss(logps, old, A, two_eight, 0.2, 10).backward()
assert logps.grad is not None, "方策に勾配が流れていません。"
for data, name in ((old, "古い対数確率"), (A, "アドバンテージ")):
    detached = data.grad is None or not data.grad.any()
    assert detached, f"{name}に勾配が流れています。"
for i, expected in ((0, -0.05), (1, 0.05)):
    grad = logps.grad[i, 0].item()
    assert close(grad, expected), f"勾配は {expected} です。いまは {grad:.4f}"
assert not logps.grad[two_eight == 0].any(), "詰め物に勾配が流れています。"
print("✓ 勾配")
### BEGIN HIDDEN TESTS
logps = torch.zeros(2, 9).double().requires_grad_()
dr_grpo_loss(logps, logps, plus_minus, two_eight, 0.2, 10).backward()
assert close(logps.grad[0, 0].item(), -0.05), "古い対数確率の勾配が、方策の勾配を打ち消しています。"
lengths = [3, 1, 5, 2]
logps, old, A, mask = random_batch(lengths, 6, seed=21)
for leaf in (logps, old, A):
    leaf.requires_grad_()
dr_grpo_loss(logps, old, A, mask, 0.2, 4).backward()
for data in (old, A):
    assert data.grad is None or not data.grad.any(), "データに勾配が流れています。"
for i, n in enumerate(lengths):
    for t in range(6):
        w, a = math.exp((logps - old)[i, t].item()), A[i].item()
        stopped = t >= n or (w > 1.2 and a > 0) or (w < 0.8 and a < 0)
        expected = 0.0 if stopped else -w * a / 16
        assert close(logps.grad[i, t].item(), expected), "勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた Dr. GRPO の損失です。長さ 6 まで生成させる学習では、TRL と同じ値になりました。

# %% nbgrader={"grade": false, "grade_id": "buggy_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_loss(logps, old_logps, advantages, mask, epsilon, L):
    ratio = (logps - old_logps).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    A = advantages[:, None]
    objective = torch.minimum(ratio * A, clipped * A) * mask
    return -objective.sum(-1).mean() / mask.shape[1]


# %% [markdown]
# 正しい損失なら、次の 3 つがいつでも成り立ちます（詰め物に NaN はないものとします）。
#
# 1. **比例** アドバンテージを 2 倍にすると、損失も 2 倍になります（左辺は 2 倍にした損失、右辺は損失の 2 倍）。
# 2. **詰め物** 右に詰め物の列を `extra` 列足しても、損失は変わりません（左辺は足したあと、右辺は足す前）。
# 3. **並べ替え** 行の順番を逆にしても、損失は変わりません（左辺は逆にしたあと、右辺はもとのまま）。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, extra):
    """3 つの恒等式の名前、左辺、右辺"""
    logps, old, A, mask = random_batch([3, 1, 6, 2], 6, seed=2)
    wide = [torch.cat([x, torch.zeros(4, extra)], 1) for x in (logps, old, mask)]
    base = loss(logps, old, A, mask, 0.2, 6).item()
    double = loss(logps, old, 2 * A, mask, 0.2, 6).item()
    padded = loss(wide[0], wide[1], A, wide[2], 0.2, 6).item()
    turned = loss(*[x.flip(0) for x in (logps, old, A, mask)], 0.2, 6).item()
    return [("1 比例　　", double, 2 * base), ("2 詰め物　", padded, base),
            ("3 並べ替え", turned, base)]


def show_identities(loss, extra):
    for name, left, right in identities(loss, extra):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_loss, extra=0)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# `extra=0` では、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_loss, extra=…)` を呼び、 `extra` を変えてみましょう。
# 成り立たなくなる恒等式の番号を `failed_identity` に、 `extra=4` のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（extra = 4 のとき）
### BEGIN SOLUTION
failed_identity = 2
left_side = identities(buggy_loss, extra=4)[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
_logps, _old, _A, _mask = random_batch([3, 1, 6, 2], 6, seed=2)
_w = (_logps - _old).exp()
_terms = torch.minimum(_w * _A[:, None], _w.clamp(0.8, 1.2) * _A[:, None]) * _mask
assert failed_identity == 2, "破れているのは別の恒等式です。"
assert close(left_side, -_terms.sum().item() / 40, 2e-4), "extra = 4 で左辺を測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_loss` の誤りを直したものを `repaired_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_loss(logps, old_logps, advantages, mask, epsilon, L):
    ### BEGIN SOLUTION
    ratio = (logps - old_logps).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    A = advantages[:, None]
    objective = torch.minimum(ratio * A, clipped * A) * mask
    return -objective.sum(-1).mean() / L
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for extra in (0, 4, 20):
    for name, left, right in identities(repaired_loss, extra):
        assert close(left, right), f"「{name.strip()}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed, L in ((31, 5), (32, 16), (33, 512)):
    lengths = [3, 1, 5, 2]
    logps, old, A, mask = random_batch(lengths, 9, seed)
    total = 0.0
    for i, n in enumerate(lengths):
        for t in range(n):
            w, a = math.exp((logps - old)[i, t].item()), A[i].item()
            total += min(w * a, min(max(w, 0.8), 1.2) * a)
    value = repaired_loss(logps, old, A, mask, 0.2, L).item()
    assert close(value * L, -total / 4), f"L = {L} で値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# プロンプトは 1 つ、回答は A、B、C の 3 つだけという小さな世界を考えます。
#
# - 方策はロジット $\theta\in\mathbb{R}^3$ の softmax で、回答の確率 $\pi$ は A が 0.2、B が 0.5、C が 0.3 です。スコア関数は $S(y)=e_y-\pi$ です（ $e_y$ は、 $y$ の成分だけが 1 のベクトル）。
# - 報酬は A が 1、B と C が 0 です。長さは A が 2、B が 1、C が 6 トークンです。
# - $G$ 個の回答を互いに独立に引き、 $\frac1G\sum_i\widehat A_iS(y_i)$ の期待値を、本当の勾配 $\nabla J=\mathbb{E}[r\,S(y)]$ と比べます。
#
# ### 3.1　予想する
#
# - `predicted_factor` ： $G=5$ のとき、Dr. GRPO（グループの平均を引くだけ）の期待値は、 $\nabla J$ の何倍でしょうか。
# - `predicted_angle` ： さらに標準偏差で割ると、期待値の向きは $\nabla J$ から何度ずれるでしょうか。

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_factor = 倍率
# predicted_angle = 角度（度）
### BEGIN SOLUTION
predicted_factor = 1 - 1 / 5
predicted_angle = 0.0
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_factor", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 < predicted_factor < 2, "正の倍率を入れてください。"
assert not close(predicted_factor, 1.0, 0.01), (
    "平均には、自分の報酬も入っています。")
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_factor, 0.8, 0.01), "倍率の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_angle", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_angle <= 180, "角度は 0 から 180 までの数です。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_angle, 0.0, 0.5), "角度の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# あらゆるグループを数え上げて、勾配の期待値を計算してください。 `groups` の 1 行が 1 つのグループ（回答の番号が $G$ 個）で、グループの確率は、回答の確率の積です。
# `scale` が `True` なら、アドバンテージを（不偏の標準偏差 ＋ $10^{-4}$ ）で割ります。 `per_token` が `True` なら、 $S(y_i)$ を長さ $|y_i|$ で割ります。

# %% nbgrader={"grade": false, "grade_id": "expected_gradient", "locked": false, "schema_version": 3, "solution": true, "task": false}
def expected_gradient(
    probs, rewards, lengths, G, scale=False, per_token=False
):
    """全グループを数え上げた、(1/G) Σ Â_i S(y_i) の期待値 (K,) を返す"""
    pi, r, n = (torch.tensor(x, dtype=torch.float64)
                for x in (probs, rewards, lengths))
    scores = torch.eye(len(pi)).double() - pi  # S(y) を並べた行列 (K, K)
    groups = torch.cartesian_prod(*[torch.arange(len(pi))] * G)  # (K^G, G)
    ### BEGIN SOLUTION
    chances = pi[groups].prod(-1)
    A = r[groups] - r[groups].mean(-1, keepdim=True)
    if scale:
        A = A / (r[groups].std(-1, keepdim=True) + 1e-4)
    if per_token:
        A = A / n[groups]
    return torch.einsum("n,ni,nik->k", chances, A, scores[groups]) / G
    ### END SOLUTION


# %% nbgrader={"grade": false, "grade_id": "world", "locked": true, "schema_version": 3, "solution": false, "task": false}
WORLD = (0.2, 0.5, 0.3), (1.0, 0.0, 0.0), (2, 1, 6)  # 確率、報酬、長さ
truth = torch.tensor([0.2 * 0.8, -0.2 * 0.5, -0.2 * 0.3]).double()  # ∇J

# %% nbgrader={"grade": true, "grade_id": "test_expected_gradient", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
measured = expected_gradient(*WORLD, G=2)
assert measured.shape == (3,), "ロジットと同じ 3 つの数を返してください。"
assert close(measured.sum().item(), 0), "softmax では、勾配の和は 0 です。"
assert torch.allclose(measured, truth / 2), (
    f"G = 2 なら ∇J の半分です。いまは {measured.tolist()}")
print("✓ 数え上げられました")
### BEGIN HIDDEN TESTS
def _binomial(n, k, p):
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


_cases = ((WORLD, 2), (WORLD, 5), (((0.1, 0.6, 0.1, 0.2), (1.0, 0.3, 0.0, -2.0), (1, 4, 3, 8)), 4))
for (_p, _r, _n), _G in _cases:
    _pi, _rew, _len = (torch.tensor(x, dtype=torch.float64) for x in (_p, _r, _n))
    _S = torch.eye(len(_pi)).double() - _pi
    _J = (_pi * _rew).sum()
    _plain = (_pi * _rew) @ _S * (1 - 1 / _G)
    _token = (_pi * (_rew - _J) / _len) @ _S * (1 - 1 / _G)
    assert torch.allclose(expected_gradient(_p, _r, _n, _G), _plain), "Dr. GRPO の値が違います。"
    found = expected_gradient(_p, _r, _n, _G, per_token=True)
    assert torch.allclose(found, _token), "per_token=True の値が違います。"
for _G in (2, 5):  # 0/1 の報酬なら、標準偏差で割っても ∇J の定数倍
    _w = sum(_binomial(_G, k, 0.2) * k * (_G - k) / _G**2
             / (math.sqrt(k * (_G - k) / (_G * (_G - 1))) + 1e-4) for k in range(1, _G)) / 0.16
    found = expected_gradient(*WORLD, _G, scale=True)
    assert torch.allclose(found, _w * truth), "scale=True の値が違います。"
_both = expected_gradient((0.5, 0.5), (1.0, 0.0), (1, 3), 2, scale=True, per_token=True)
_by_hand = 0.5 * 0.5 / (math.sqrt(0.5) + 1e-4) * (0.5 + 0.5 / 3) / 2
assert close(_both[0].item(), _by_hand), "両方を True にしたときの値が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
def angle(u, v):
    u, v = u / u.norm(), v / v.norm()
    return math.degrees(2 * torch.atan2((u - v).norm(), (u + v).norm()))


ratio = (expected_gradient(*WORLD, G=5) / truth).mean().item()
print(f"倍率   予想 {predicted_factor:.4f}   測定 {ratio:.4f}")
turned = angle(expected_gradient(*WORLD, G=5, scale=True), truth)
print(f"標準偏差で割る   予想 {predicted_angle:.2f} 度   測定 {turned:.2f} 度")
for G in (2, 5):
    turned = angle(expected_gradient(*WORLD, G, per_token=True), truth)
    print(f"（参考）長さで割る、G = {G}   測定 {turned:.2f} 度")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 次は、 **不正解の回答だけ** の長さがどう変わるかを、勾配の期待値で計算したものです。回答は、一歩ごとに確率 $h$ で終わり、最長 20 トークンです。不正解なので、アドバンテージの期待値は $-0.2$ とします（長さとは無関係です）。 $h$ のロジットを、GRPO（ $1/|y|$ を掛ける）と Dr. GRPO（掛けない）の勾配の期待値で更新します。

# %% nbgrader={"grade": false, "grade_id": "length_training", "locked": true, "schema_version": 3, "solution": false, "task": false}
steps = torch.arange(1, 21).double()  # 長さ 1〜20
history = {}
for name, weight in (("GRPO", 1 / steps), ("Dr. GRPO", torch.ones(20))):
    logit = torch.tensor(-1.1).double().requires_grad_()
    history[name] = []
    for _ in range(60):
        go, stop = torch.nn.functional.logsigmoid(torch.stack([-logit, logit]))
        logps = go * (steps - 1) + stop * (steps < 20)  # 最後は打ち切り
        chances = logps.exp().detach()
        history[name].append((chances * steps).sum().item())
        objective = (chances * weight * -0.2 * logps).sum()
        (slope,) = torch.autograd.grad(objective, logit)
        logit = (logit + 2 * slope).detach().requires_grad_()

# %% nbgrader={"grade": false, "grade_id": "length_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
curves(history, {"不正解の回答の長さの期待値（トークン）": {
    name: name for name in history}})

# %% [markdown]
# 次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - GRPO で、不正解の回答が長くなるのはなぜか（ $1/|y|$ と、アドバンテージの符号を使って）
# - アドバンテージが負なのに、Dr. GRPO では長さが動かないのはなぜか（スコア関数の期待値を使って）
# - 自分の学習で回答が長くなったとき、それがこのずれのせいかどうかを見分けるには、何を描けばよいか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** GRPO では、回答のアドバンテージがトークンに $1/|y|$ ずつ配られるので、不正解（アドバンテージが負）の回答のうち、短いものは 1 トークンあたり強く罰せられ、長いものは弱く罰せられます。短い不正解のほうが速く減るので、不正解の長さの期待値は伸びていきます。Dr. GRPO ではどの回答にも同じ重みが掛かり、アドバンテージは長さによらない定数なので、勾配の期待値は $-0.2\,\mathbb{E}[S(y)]=0$ になり、長さは動きません。 $1/|y|$ を掛けると $\mathbb{E}[S(y)/|y|]\ne0$ なので、同じ定数が長さを動かします。学習で回答が長くなったときは、正解の回答と不正解の回答の長さを分けて描きます。不正解だけが伸びているなら、思考が深まったのではなく、このずれが疑われます。
#
# **採点の目安** 短い不正解ほど 1 トークンあたりの罰が重いこと（1 点）、定数のアドバンテージでは $\mathbb{E}[S]=0$ で消えること（1 点）、正解と不正解の長さを分けて見ること（1 点）。
