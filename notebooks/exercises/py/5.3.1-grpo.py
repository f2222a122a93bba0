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
# # 演習 5.3.1 GRPO
#
# アドバンテージと GRPO の損失関数を自分の手で書き、ほかの人の実装に潜む誤りを見つけ、標準偏差で割ることの効き方を先に言い当ててから測ります。5.3.1 節を読み終えた方に向けた演習です。
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
# | $r_i$ | 回答の報酬 | `rewards` | (B,) |
# | $\widehat A_{i,t}$ | アドバンテージ（どの $t$ でも同じ） | `advantages` | (B,) |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}},\ \log\pi_{\mathrm{ref}}$ | トークンの対数確率 | `logps`, `old_logps`, `ref_logps` | (B, T) |
# | – | 回答のトークンなら True、詰め物なら False | `mask` | (B, T) |
# | $\epsilon$ | クリッピングの幅 | `epsilon` | – |
# | $\beta$ | KL 正則化の係数 | `beta` | – |

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


def hint_for(value, hints, otherwise):
    """よくある誤りの値と一致したら、その説明を返す"""
    for wrong, hint in hints.items():
        if close(value, wrong, 2e-6):
            return hint
    return otherwise


# %% [markdown]
# ## 問 1　アドバンテージと損失関数を実装する（8 点）
#
# ### 1.1　アドバンテージ
#
# 式 (5.1) のアドバンテージを計算してください。同じグループの $G$ 行は続けて並んでいます。標準偏差は $G-1$ で割る形とし、分母には `1e-4` を足します。
# $G$ が 1 なら比べる相手がなく、行数が $G$ の倍数でなければグループが作れません。どちらのときも `ValueError` を起こしてください。
#
# $$
# \widehat A_i=\frac{r_i-\mathrm{mean}(r_1,\dots,r_G)}{\mathrm{std}(r_1,\dots,r_G)+10^{-4}}
# $$

# %% nbgrader={"grade": false, "grade_id": "group_advantages", "locked": false, "schema_version": 3, "solution": true, "task": false}
def group_advantages(rewards, group_size):
    """報酬 (B,) から、アドバンテージ (B,) を返す"""
    ### BEGIN SOLUTION
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError("G は 2 以上で、行数を割り切る数にしてください")
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred / (groups.std(-1, keepdim=True) + 1e-4)).reshape(-1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_advantages", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
found = group_advantages(double([1, 0, 0, 0, 5, 5, 5, 5]), 4)
assert isinstance(found, torch.Tensor), "torch のテンソルを返しましょう。"
assert found.shape == (8,), f"形状は (8,) です。いまは {tuple(found.shape)}"
hints = {
    1.731651: "G で割る標準偏差のようです。G − 1 で割りましょう。",
    1.5: "分母に 1e-4 が足されていないようです。",
    0.75: "標準偏差で割られていないようです。",
    2.998800: "標準偏差でなく、分散で割っているようです。",
    -0.634742: "グループに分けずに、全体で平均しているようです。",
}
hint = hint_for(found[0].item(), hints, "式と見比べてみましょう。")
assert close(found[0].item(), 1.4997), (
    f"{hint}（{found[0]:.6f}、正しくは 1.499700）")
assert close(found[1].item(), -0.4999), "外れた回答の値が違います。"
assert close(found[4:].abs().max().item(), 0), (
    "全部が同じ報酬のグループでは、0 になります。")
print("✓ アドバンテージ")
### BEGIN HIDDEN TESTS
for size, groups in ((2, 3), (3, 2), (5, 4), (8, 2)):
    g = torch.Generator().manual_seed(size)
    rewards = torch.randn(size * groups, generator=g, dtype=torch.float64)
    value = group_advantages(rewards.clone(), size)
    assert value.shape == rewards.shape, "形状が違います。"
    for i, r in enumerate(rewards.tolist()):
        group = rewards[i // size * size:i // size * size + size].tolist()
        mean = sum(group) / size
        std = math.sqrt(sum((x - mean) ** 2 for x in group) / (size - 1))
        assert close(value[i].item(), (r - mean) / (std + 1e-4)), f"G = {size} で値が違います。"
tiny = group_advantages(double([1e-4, 0.0]), 2)
assert close(tiny[0].item(), 5e-5 / (1e-4 / math.sqrt(2) + 1e-4)), "分母に 1e-4 を足します。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_bad_groups", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
def refused(rewards, group_size):
    try:
        group_advantages(double(rewards), group_size)
    except ValueError:
        return True
    return False


assert refused([1.0, 0.0], 1), "G = 1 のときは ValueError を起こしましょう。"
assert refused([1.0] * 5, 2), "行数が G の倍数でないときは ValueError です。"
print("✓ グループが作れないとき")
### BEGIN HIDDEN TESTS
for rows, size in ((3, 1), (3, 4), (7, 3)):
    assert refused([0.5] * rows, size), f"{rows} 行、G = {size} は断りましょう。"
for rows, size in ((2, 2), (6, 3), (6, 2)):
    assert not refused([0.5] * rows, size), f"{rows} 行、G = {size} は断りません。"
### END HIDDEN TESTS

# %% [markdown]
# ### 1.2　GRPO の損失
#
# 式 (5.4) の符号を反転した損失を書いてください。次の点に注意します。
#
# - 平均は二段階です。 **回答の中のトークンで** 平均し、それから **回答で** 平均します。
# - KL の推定量は $e^d-d-1$、 $d=\log\pi_{\mathrm{ref}}-\log\pi_\theta$ です。
# - 詰め物の場所には、何が入っているか分かりません（ `nan` でも）。損失にも勾配にも影響してはいけません。
# - 勾配は `logps` だけに流れます。ほかはデータです。
#
# $$
# \mathcal{L}=-\frac1B\sum_{i=1}^{B}\frac1{|y_i|}\sum_{t=1}^{|y_i|}\Bigl(\min\{w_{i,t}\widehat A_i,\ \mathrm{clip}(w_{i,t},1-\epsilon,1+\epsilon)\widehat A_i\}-\beta\widehat D_{\mathrm{KL}}^{i,t}\Bigr)
# $$

# %% nbgrader={"grade": false, "grade_id": "grpo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def grpo_loss(logps, old_logps, ref_logps, advantages, mask, epsilon, beta):
    """GRPO の損失（スカラー）を返す"""
    ### BEGIN SOLUTION
    log_ratio = torch.where(mask, logps - old_logps.detach(), 0.0)
    d = torch.where(mask, ref_logps.detach() - logps, 0.0)
    ratio = log_ratio.exp()
    A = advantages.detach()[:, None]
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    objective = torch.minimum(ratio * A, clipped * A)
    per_token = -objective + beta * (d.exp() - d - 1)
    summed = torch.where(mask, per_token, 0.0).sum(-1)
    return (summed / mask.sum(-1)).mean()
    ### END SOLUTION


# %% [markdown]
# はじめは、1 トークンの回答を 1 つずつ。重要度比が 1.5 と 0.5、アドバンテージが $\pm1$、 $\epsilon=0.2,\ \beta=0$ です。

# %% nbgrader={"grade": true, "grade_id": "test_clip", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
def one_token(ratio, A, epsilon=0.2, beta=0.0, d=0.0):
    """1 トークンの損失と、log π についての傾き"""
    logp = double([[math.log(ratio)]]).requires_grad_()
    loss = grpo_loss(logp, double([[0.0]]), logp.detach() + d, double([A]),
                     torch.ones(1, 1, dtype=torch.bool), epsilon, beta)
    assert isinstance(loss, torch.Tensor), "torch のテンソルを返しましょう。"
    assert loss.shape == (), "損失はスカラーです。平均をとりましょう。"
    loss.backward()
    return loss.item(), logp.grad.item()


hints = {-1.5: "クリップが効いていないようです。", 1.2: "符号が逆のようです。"}
value, slope = one_token(1.5, 1.0)
hint = hint_for(value, hints, "式と見比べてみましょう。")
assert close(value, -1.2) and close(slope, 0), f"比 1.5、A = +1: {hint}"
value, slope = one_token(1.5, -1.0)
assert close(value, 1.5) and close(slope, 1.5), (
    "比 1.5、A = −1: 悪い回答の確率が上がった側では、切りません。")
value, slope = one_token(0.5, 1.0)
assert close(value, -0.5), "比 0.5、A = +1: この側では切りません。"
print("✓ クリッピング")
### BEGIN HIDDEN TESTS
for ratio in (0.3, 0.75, 0.97, 1.0, 1.15, 1.25, 2.5):
    for A in (-2.0, 0.5, 1.5):
        for epsilon in (0.05, 0.2, 0.5):
            clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
            expected = -min(ratio * A, clipped * A)
            value, slope = one_token(ratio, A, epsilon)
            assert close(value, expected), f"比 {ratio}、A = {A}、ε = {epsilon} で値が違います。"
            moving = -ratio * A if ratio * A <= clipped * A else 0.0
            assert close(slope, moving), f"比 {ratio}、A = {A}、ε = {epsilon} で勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# 次は KL の項です。 $A=0,\ \beta=1$ とし、 $d=\pm\log2$ のときの値を見ます。

# %% nbgrader={"grade": true, "grade_id": "test_kl", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
value, slope = one_token(1.0, 0.0, beta=1.0, d=math.log(2))
hints = {
    0.193147: "d の符号が逆のようです。log π_ref − log π_θ です。",
    -0.306853: "KL の項の符号が逆のようです。損失では足します。",
    -0.693147: "−d（k1）になっているようです。",
    0.240227: "d²/2（k2）になっているようです。",
    0.0: "KL の項がないか、方策の対数確率どうしの差になっているようです。",
}
hint = hint_for(value, hints, "式と見比べてみましょう。")
assert close(value, 0.306853), f"{hint}（{value:.6f}、正しくは 0.306853）"
assert close(slope, -1), "値は合っていますが、勾配が違います。比は掛けません。"
value, _ = one_token(1.0, 0.0, beta=1.0, d=-math.log(2))
assert close(value, 0.193147), f"d = −log 2 で {value:.6f}（正しくは 0.193147）"
print("✓ KL の推定量")
### BEGIN HIDDEN TESTS
for d in (-2.0, -0.3, 0.0, 0.1, 1.7):
    for beta in (0.04, 0.5):
        value, slope = one_token(1.0, 0.7, beta=beta, d=d)
        assert close(value, -0.7 + beta * (math.exp(d) - d - 1)), f"d = {d}、β = {beta} で値が違います。"
        assert close(slope, -0.7 + beta * (1 - math.exp(d))), f"d = {d}、β = {beta} で勾配が違います。"
value, slope = one_token(1.1, 1.0, beta=0.5, d=0.6)  # KL に重要度比は掛けない
assert close(value, -1.1 + 0.5 * (math.exp(0.6) - 1.6)), "KL の項に重要度比は掛けません。"
### END HIDDEN TESTS

# %% [markdown]
# 最後は、長さの違う 2 つの回答です。長さは 1 と 3、比はすべて 1、アドバンテージは $+1$ と $-1$ です。詰め物には、でたらめな値を入れてあります。

# %% nbgrader={"grade": true, "grade_id": "test_lengths", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
mask = torch.tensor([[True, False, False, False], [True, True, True, False]])
for rubbish in (0.0, 500.0, math.nan):
    junk = torch.full((2, 4), rubbish, dtype=torch.float64)
    tokens = torch.where(mask, double([[-1.0], [-2.0]]), junk)
    tokens.requires_grad_()
    loss = grpo_loss(tokens, torch.where(mask, tokens.detach(), -junk),
                     torch.where(mask, tokens.detach(), 0.0),
                     double([1.0, -1.0]), mask, 0.2, 0.04)
    hints = {
        0.5: "全部のトークンで一度に平均しているようです（DAPO の形）。",
        1.0: "回答の中で、平均でなく和をとっているようです。",
        0.25: "|y_i| でなく、詰め物も含めた長さで割っているようです。",
    }
    if not math.isfinite(loss.item()):
        hint = "exp の中に詰め物の値が入っています。先にマスクしましょう。"
    else:
        hint = hint_for(loss.item(), hints, "二段階で平均しましょう。")
    assert close(loss.item(), 0), (
        f"詰め物が {rubbish} のとき {loss.item():.4f}（正しくは 0）。{hint}")
    loss.backward()
    expected = torch.where(mask, double([[-0.5], [0.5 / 3]]), 0.0)
    assert torch.allclose(tokens.grad, expected), (
        f"詰め物が {rubbish} のとき、勾配が違います。")
print("✓ 長さと詰め物")
### BEGIN HIDDEN TESTS
for seed in range(4):
    g = torch.Generator().manual_seed(seed)
    rows, width = 5 + seed, 6
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    new = -torch.rand(rows, width, generator=g, dtype=torch.float64)
    old, ref = (new + 0.4 * torch.randn(new.shape, generator=g, dtype=torch.float64) for _ in range(2))
    A = torch.randn(rows, generator=g, dtype=torch.float64)
    expected = 0.0
    for i in range(rows):
        for t in range(lengths[i]):
            w, d = math.exp(new[i, t] - old[i, t]), (ref[i, t] - new[i, t]).item()
            objective = min(w * A[i].item(), min(max(w, 0.8), 1.2) * A[i].item())
            expected -= (objective - 0.3 * (math.exp(d) - d - 1)) / lengths[i].item() / rows
    junk = [torch.where(mask, x, x.new_full((), fill)) for x, fill in
            ((new, math.nan), (old, 1e4), (ref, -math.inf))]
    assert close(grpo_loss(*junk, A, mask, 0.2, 0.3).item(), expected), "別の数値で値が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_data", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
new, old = (double([[-1.0, -2.0]]).requires_grad_() for _ in range(2))
ref, A = double([[-1.5, -1.0]]).requires_grad_(), double([1.0]).requires_grad_()
both = torch.ones(1, 2, dtype=torch.bool)
grpo_loss(new, old, ref, A, both, 0.2, 0.1).backward()
for data, name in ((old, "古い方策"), (ref, "参照方策"), (A, "アドバンテージ")):
    assert data.grad is None or not data.grad.any(), (
        f"{name}に勾配が流れています。")
expected = double([[-0.4803265, -0.5859141]])
assert torch.allclose(new.grad, expected), "方策の勾配が違います。"
print("✓ データに勾配は流れない")
### BEGIN HIDDEN TESTS
new = double([[-1.0, -2.0], [-3.0, -0.5]]).requires_grad_()
both = torch.ones(2, 2, dtype=torch.bool)
grpo_loss(new, new, new - 1, double([1.0, -2.0]), both, 0.2, 0.4).backward()
_kl = 0.1 * (1 - math.exp(-1))
assert torch.allclose(new.grad, double([[-0.25, -0.25], [0.5, 0.5]]) + _kl), "データが方策の勾配を打ち消しています。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 2　恒等式で誤りを見つける（4 点）
#
# 次は、ある人が書いた GRPO の損失です（クリップは省いてあります）。学習を始めると損失は 0 から出発し、報酬も上がります。

# %% nbgrader={"grade": false, "grade_id": "buggy_grpo_loss", "locked": true, "schema_version": 3, "solution": false, "task": false}
def buggy_grpo_loss(logps, old_logps, ref_logps, advantages, mask, beta):
    ratio = torch.where(mask, logps - old_logps.detach(), 0.0).exp()
    log_ratio = torch.where(mask, logps - ref_logps.detach(), 0.0)
    kl = log_ratio.exp() - log_ratio - 1
    per_token = -ratio * advantages[:, None] + beta * kl
    summed = torch.where(mask, per_token, 0.0).sum(-1)
    return (summed / mask.sum(-1)).mean()


# %% [markdown]
# 正しい損失なら、次の 3 つがいつでも成り立ちます。回答は 1 トークンで、A、B、C の 3 通り、参照方策は一様です。
#
# 1. **出発点** 方策、古い方策、参照方策が等しく、アドバンテージの和が 0 なら、損失は 0 です。
# 2. **詰め物** 右に詰め物を足しても、損失は変わりません。
# 3. **期待値** アドバンテージが 0 なら、1 トークンの損失の、方策 $\pi$ についての期待値は $\beta D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]$ です。

# %% nbgrader={"grade": false, "grade_id": "show_identities", "locked": true, "schema_version": 3, "solution": false, "task": false}
def identities(loss, pi, beta):
    """3 つの恒等式の名前、左辺、右辺。pi は A、B、C の確率"""
    logp = double(pi).log()[:, None]
    ref = torch.full_like(logp, -math.log(3))
    one = torch.ones_like(logp, dtype=torch.bool)
    A = double([1.0, -0.5, -0.5])
    start = loss(ref, ref, ref, A, one, beta)
    wide = [torch.cat([x, x + 1], 1) for x in (logp, ref, ref)]
    padded = loss(*wide, A, torch.cat([one, ~one], 1), beta)
    rows = [loss(logp[i:i + 1], logp[i:i + 1], ref[i:i + 1], 0 * A[:1],
                 one[:1], beta).item() for i in range(3)]
    expected = sum(p * row for p, row in zip(pi, rows, strict=True))
    kl = sum(p * math.log(3 * p) for p in pi)
    return [
        ("1 出発点", start.item(), 0.0),
        ("2 詰め物", padded.item(), loss(logp, ref, ref, A, one, beta).item()),
        ("3 期待値", expected, beta * kl),
    ]


# %% nbgrader={"grade": false, "grade_id": "first_look", "locked": true, "schema_version": 3, "solution": false, "task": false}
def show_identities(loss, pi, beta):
    for name, left, right in identities(loss, pi, beta):
        print(f"{name}   左辺 {left:8.4f}   右辺 {right:8.4f}")


show_identities(buggy_grpo_loss, pi=(1/3, 1/3, 1/3), beta=1.0)

# %% [markdown]
# ### 2.1　どれが破れているか
#
# 方策が一様のときは、3 つとも成り立っています。新しいセルを足して `show_identities(buggy_grpo_loss, pi=(…, …, …), beta=1.0)` を呼び、 `pi` を変えてみましょう（和は 1 です）。
# 成り立たなくなる恒等式の番号を `failed_identity` に、 $\pi=(0.6,\ 0.3,\ 0.1),\ \beta=1$ のときのその左辺の値を `left_side` に入れてください。

# %% nbgrader={"grade": false, "grade_id": "failed_identity", "locked": false, "schema_version": 3, "solution": true, "task": false}
# failed_identity = 番号（1、2、3 のどれか）
# left_side = 左辺の値（π = (0.6, 0.3, 0.1)、β = 1 のとき）
### BEGIN SOLUTION
failed_identity = 3
left_side = identities(buggy_grpo_loss, (0.6, 0.3, 0.1), 1.0)[failed_identity - 1][1]
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_failed_identity", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert failed_identity in (1, 2, 3), "番号は 1、2、3 のどれかです。"
assert math.isfinite(left_side), "left_side には数を入れてください。"
assert not close(left_side, 0.2007, 0.001), "それは右辺の値です。"
print("✓ 受け取りました。正しいかどうかは、直してみると分かります。")
### BEGIN HIDDEN TESTS
_pi = (0.6, 0.3, 0.1)
_left = sum(p * (3 * p - math.log(3 * p) - 1) for p in _pi)
assert failed_identity == 3, "破れているのは別の恒等式です。"
assert close(left_side, _left, 0.002), "π = (0.6, 0.3, 0.1) で左辺を測り直してみましょう。"
### END HIDDEN TESTS

# %% [markdown]
# ### 2.2　直す
#
# `buggy_grpo_loss` の誤りを直したものを `repaired_grpo_loss` として書いてください。

# %% nbgrader={"grade": false, "grade_id": "repaired_grpo_loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired_grpo_loss(logps, old_logps, ref_logps, advantages, mask, beta):
    ### BEGIN SOLUTION
    ratio = torch.where(mask, logps - old_logps.detach(), 0.0).exp()
    d = torch.where(mask, ref_logps.detach() - logps, 0.0)
    kl = d.exp() - d - 1
    per_token = -ratio * advantages[:, None] + beta * kl
    summed = torch.where(mask, per_token, 0.0).sum(-1)
    return (summed / mask.sum(-1)).mean()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "test_repaired", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
for pi, beta in (((0.6, 0.3, 0.1), 1.0), ((0.2, 0.2, 0.6), 0.1)):
    for name, left, right in identities(repaired_grpo_loss, pi, beta):
        assert close(left, right), f"「{name}」がまだ成り立ちません。"
print("✓ 3 つの恒等式が成り立ちます")
### BEGIN HIDDEN TESTS
for seed in (31, 32):
    g = torch.Generator().manual_seed(seed)
    new, old, ref = -torch.rand(3, 4, 3, generator=g, dtype=torch.float64)
    A = torch.randn(4, generator=g, dtype=torch.float64)
    mask = torch.arange(3) < double([[1], [3], [2], [2]])
    w, d = (new - old).exp(), ref - new
    rows = ((-w * A[:, None] + 0.5 * (d.exp() - d - 1)) * mask).sum(-1) / mask.sum(-1)
    value = repaired_grpo_loss(new, old, ref, A, mask, 0.5).item()
    assert close(value, rows.mean().item()), "別の数値で値が違います。"
new = double([[-1.0], [-0.2]]).requires_grad_()
repaired_grpo_loss(new, new.detach(), double([[-0.5], [-0.9]]), double([0.0, 0.0]), torch.ones(2, 1, dtype=torch.bool), 1.0).backward()
for i, d in enumerate((0.5, -0.7)):
    assert close(new.grad[i].item(), (1 - math.exp(d)) / 2), "KL の項の勾配が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ## 問 3　予想してから測る（5 点）
#
# 報酬は、正解なら 1、間違いなら 0 です。プロンプトの正解率を $p$、グループの大きさを $G$ とします。
#
# ### 3.1　予想する
#
# - `predicted_share` ： $p=0.25,\ G=4$ のとき、全部正解か全部間違いで、何も学べないグループの割合はいくつでしょうか。
# - `predicted_ratio` ： アドバンテージを標準偏差で割ると、プロンプトの重み（勾配の期待値を $\nabla p$ で割ったもの）が $p$ によって変わります。では $G=2$ のとき、 $p=0.05$ の重みは、 $p=0.5$ の重みの何倍でしょうか。

# %% nbgrader={"grade": false, "grade_id": "predictions", "locked": false, "schema_version": 3, "solution": true, "task": false}
# predicted_share = 何も学べないグループの割合
# predicted_ratio = 何倍か
### BEGIN SOLUTION
predicted_share = 0.25**4 + 0.75**4
predicted_ratio = 1.0
### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "test_predicted_share", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert 0 <= predicted_share <= 1, "割合は 0 から 1 までの数です。"
assert not close(predicted_share, 0.75**4, 0.001), "全部正解のグループも数えます。"
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_share, 0.25**4 + 0.75**4, 0.001), "割合の予想が違います。"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "test_predicted_ratio", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
assert predicted_ratio > 0, "重みは正の数です。"
assert not close(predicted_ratio, 2.294, 0.01), (
    "それは G が無限に大きいときの比です。G = 2 では、どうなるでしょうか。")
print("✓ 予想を受け取りました。あとで測定と比べましょう。")
### BEGIN HIDDEN TESTS
assert close(predicted_ratio, 1.0, 0.02), "重みの比の予想が違います。"
### END HIDDEN TESTS

# %% [markdown]
# ### 3.2　測る
#
# 正解の数 $k$ が 0 から $G$ までのグループを全部数え上げて、プロンプトの重みを計算してください。二項分布の確率は、関数 `chance(k)` にしてあります。
# 方策は、正解のロジット $z$ だけを持ちます（ $p=\sigma(z)$ ）。 $z$ についての $\nabla\log\pi$ は、正解の回答で $1-p$、間違いの回答で $-p$ で、 $\nabla p=p(1-p)$ です。アドバンテージには、問 1 の `group_advantages` を使えます。

# %% nbgrader={"grade": false, "grade_id": "prompt_weight", "locked": false, "schema_version": 3, "solution": true, "task": false}
def prompt_weight(p, G):
    """E[(1/G) Σ_i A_i ∇log π(y_i)] を ∇p で割った、プロンプトの重み"""
    def chance(k):
        return math.comb(G, k) * p**k * (1 - p) ** (G - k)

    gradient = 0.0
    for k in range(G + 1):
        rewards = double([1.0] * k + [0.0] * (G - k))
        ### BEGIN SOLUTION
        A = group_advantages(rewards, G)
        gradient += chance(k) * (A * (rewards - p)).mean().item()
        ### END SOLUTION
    return gradient / (p * (1 - p))


# %% nbgrader={"grade": true, "grade_id": "test_prompt_weight", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
measured = prompt_weight(0.5, 2)
hints = {
    1.414214: "G で平均していないようです。",
    0.5: "標準偏差で割っていないようです。",
    0.176777: "∇p で割るところが、余分に掛かっているようです。",
}
hint = "式と見比べてみましょう。"
for wrong, text in hints.items():
    if close(measured, wrong, 5e-4):
        hint = text
assert close(measured, 0.7071, 5e-4), (
    f"{hint}（{measured:.4f}、正しくは 0.7070）")
print("✓ プロンプトの重み")
### BEGIN HIDDEN TESTS
for _p in (0.05, 0.3, 0.5, 0.8):
    for _G in (2, 3, 4, 8, 16):
        _mean = sum(math.comb(_G, k) * _p**k * (1 - _p) ** (_G - k) * math.sqrt(k * (_G - k))
                    for k in range(_G + 1))
        _weight = math.sqrt((_G - 1) / _G) * _mean / (_G * _p * (1 - _p))
        assert close(prompt_weight(_p, _G), _weight, 1e-3 * _weight), f"p = {_p}、G = {_G} で違います。"
### END HIDDEN TESTS

# %% [markdown]
# 予想と測定を並べます。違っていたら、予想のどこが足りなかったのかを考えて、3.1 に戻って直してください。予想が外れたところにこそ、学ぶことがあります。

# %% nbgrader={"grade": false, "grade_id": "comparison", "locked": true, "schema_version": 3, "solution": false, "task": false}
coins = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(0))
right = (coins < 0.25).sum(-1)
share = ((right == 0) | (right == 4)).double().mean().item()
print(f"学べないグループの割合   予想 {predicted_share:.4f}   測定 {share:.4f}")
print(f"G = 2 の重みの比         予想 {predicted_ratio:.4f}")
for G in (2, 4, 8, 64):
    ratio = prompt_weight(0.05, G) / prompt_weight(0.5, G)
    print(f"    G = {G:2}: 測定 {ratio:.4f}")

# %% [markdown]
# ## 問 4　言葉で説明する（3 点）
#
# 次は、正解率 0.3 のプロンプトを、 $G=8,\ \beta=0$ で学習した記録です。一度の生成で、一度だけ更新しています。 $\epsilon$ を 0.2 と 0.001 で比べます。

# %% nbgrader={"grade": false, "grade_id": "on_policy_training", "locked": true, "schema_version": 3, "solution": false, "task": false}
history = {}
for epsilon in (0.2, 0.001):
    g = torch.Generator().manual_seed(0)
    z = double(math.log(0.3 / 0.7)).requires_grad_()
    rows = {"報酬": [], "損失": [], "勾配の大きさ": []}
    for _ in range(60):
        right = (torch.rand(8, 8, generator=g) < torch.sigmoid(z)).double()
        A = right - right.mean(-1, keepdim=True)
        A = A / (right.std(-1, keepdim=True) + 1e-4)
        logps = torch.nn.functional.logsigmoid((2 * right - 1) * z)
        ratio = (logps - logps.detach()).exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(ratio * A, clipped * A).mean()
        (slope,) = torch.autograd.grad(loss, z)
        for name, value in zip(rows, (right.mean(), loss, slope.abs()),
                               strict=True):
            rows[name].append(value.item())
        z = (z - 0.3 * slope).detach().requires_grad_()
    history |= {f"{name}、{epsilon}": values for name, values in rows.items()}

# %% nbgrader={"grade": false, "grade_id": "on_policy_figure", "locked": true, "schema_version": 3, "solution": false, "task": false}
same = all(history[f"{name}、0.2"] == history[f"{name}、0.001"] for name in rows)
print("ε = 0.2 と 0.001 の記録はまったく同じか:", same)
curves(history, {name: f"{name}、0.2" for name in rows})

# %% [markdown]
# 次の 3 つに触れながら、何が起きているのかを 3〜6 文で説明してください。
#
# - 損失がずっと 0（丸め誤差を除いて）なのに、報酬が上がるのはなぜか
# - $\epsilon$ を変えても、記録がまったく同じなのはなぜか
# - 自分の学習では、損失の代わりに何を見ればよいか

# %% [markdown] nbgrader={"grade": true, "grade_id": "explanation", "locked": false, "points": 3, "schema_version": 3, "solution": true, "task": false}
# **解答例** 更新のたびに生成し直すので、重要度比はいつも 1 です。このとき損失の値は、アドバンテージの平均の符号を変えたもので、グループの中でアドバンテージの和は 0 ですから、損失はいつも 0 です。しかし勾配は、トークンごとに $-\widehat A_i/(G|y_i|)$ で、0 ではありません。良い回答の確率は上がり、悪い回答の確率は下がるので、報酬は上がります。比が 1 なら、 $\epsilon>0$ がいくつであっても、クリップの範囲の中にいるので、 $\epsilon$ は何にも影響しません（ `num_iterations` を 2 以上にして、同じデータで何度も更新すると、初めて効きます）。損失の代わりに、報酬、勾配のノルム、退化したグループの割合（TRL では `frac_reward_zero_std` ）、生成した回答そのものを見ます。
#
# **採点の目安** 値は 0 でも勾配は 0 でないこと（1 点）、比が 1 なので $\epsilon$ が効かないこと（1 点）、報酬や退化したグループの割合を見ること（1 点）。
