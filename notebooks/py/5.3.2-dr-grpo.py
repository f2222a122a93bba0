# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5.3.2 Dr. GRPO：二つの割り算をやめる
#
# 本書 5.3.2 節の式 (5.10)〜(5.12) を扱います。
#
# GRPO（5.3.1 節）の目的関数には、割り算が 2 つあります。アドバンテージをグループの標準偏差で割り、回答ごとに長さで割るのです。
# Dr. GRPO（GRPO done right の意味です）は、この 2 つをやめます。すると、いまの方策から独立に引いた回答での勾配の期待値は、報酬の期待値の勾配の、ちょうど $(1-1/G)$ 倍になります。
# このノートブックでは、そのことを **すべてのグループを数え上げて** 確かめ、2 つの割り算のそれぞれが勾配の向きを何度ずらすのかを測ります。TRL の `GRPOTrainer` と値・勾配が一致することを確かめたあと、小さな言語モデルを学習させ、「悪い回答ほど長くなる」という GRPO の癖が、Dr. GRPO と DAPO では消えることを見ます。
#
# 準備のしかたは [README](../README.md) に、実行時間の実測値は [RUNTIMES.md](../RUNTIMES.md) にあります。 `companion` は、このノートブックのための小さなパッケージです。
# `claim` は等式の両辺を計算して比べ（許容差は、断りがなければ 1e-10）、 `check` は条件を確かめます。成り立たなければ、そこでエラーになって止まります。

# %%
import torch

from companion.notebook import check, claim, setup

setup()

# %% [markdown]
# ## 記号
#
# | 記号 | 変数 | 形状 | TRL での名前 |
# |---|---|---|---|
# | $x,\ y_i$ （プロンプト、グループの $i$ 番目の回答） | `prompt`, `completion` | – | 同じ |
# | $G$ （グループの大きさ） | `group_size`, `G` | – | `num_generations` |
# | $r_i$ （ $y_i$ の報酬） | `rewards` | (B,) | `reward` （平均） |
# | $\widehat A^{\mathrm{Dr}}_i$ （アドバンテージ） | `advantages` | (B,) | `advantages` |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}}$ （トークンの対数確率） | `logps`, `old_logps` | (B, T) | `per_token_logps`, `old_per_token_logps` |
# | $w_{i,t}(\theta)$ （重要度比） | `ratio` | (B, T) | `coef_1` |
# | $\epsilon$ （クリッピングの幅） | `epsilon` | – | `epsilon` |
# | $\lvert y_i\rvert$ （回答の長さ。EOS を含む） | `mask.sum(-1)` | (B,) | `completion_mask.sum(-1)` |
# | $L$ （TRL が損失をさらに割る定数） | `max_completion_length` | – | 同じ |
# | $J(\theta)$ （報酬の期待値） | `J` | – | – |
#
# B は回答の総数（プロンプトの数 × $G$ ）で、同じグループの行は続けて並べます。T はいちばん長い回答の長さで、 `mask` は回答のトークンで 1、詰め物で 0 です。数え上げる世界では、X がプロンプトの数、Y が回答の数です。対数確率の単位は nat です。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 文字は a だけ、回答は最長 3 トークンという、とても小さな言語を用意します。回答は EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。
# 方策は、プロンプトと、それまでに書いた文字列（接頭辞）ごとに、次のトークンのロジットを並べた表です（表形式の方策）。ロジットも報酬も、乱数で決めます。

# %%
from companion.exact import World, expect

world = World(prompts=1, letters=1, max_length=3)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %%
g = torch.Generator().manual_seed(0)
theta = world.random_logits(g)  # (1, 接頭辞, トークン)
rewards = world.random_rewards(g)[0]  # (Y,)
probs = world.log_probs(theta)[0].exp()  # (Y,)

# %% [markdown]
# 回答が 4 通りなら、 $G=3$ 個の回答からなるグループは、全部で $4^3=64$ 通りです。 **グループを全部** 数え上げれば、「グループを引いて計算した勾配」の期待値も、有限の和になります。

# %%
def all_groups(responses, G):
    """回答の番号の、あらゆる組 (Y^G, G)。"""
    return torch.cartesian_prod(*[torch.arange(responses)] * G)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


# %%
G = 3
groups = all_groups(len(probs), G)
chances = probs[groups].prod(-1)  # 互いに独立に引くので、確率は積
claim(f"{len(groups)} 通りのグループの確率の和は 1", chances.sum(), 1.0)

# %% [markdown]
# ### ステップ 1：目標は、報酬の期待値の勾配
#
# 強化学習で大きくしたいのは、報酬の期待値 $J(\theta)=\mathbb{E}_{y\sim\pi_\theta(\cdot\mid x)}[r(x,y)]$ です。その勾配は、スコア関数 $S(y)=\nabla_\theta\log\pi_\theta(y\mid x)$ を使って、次のように書けます（方策勾配定理）。
#
# $$
# \nabla J=\mathbb{E}_{y\sim\pi_\theta}[r(x,y)\,S(y)],\qquad
# S(y)=\sum_{t=1}^{|y|}\nabla_\theta\log\pi_\theta(y_t\mid x,y_{<t}),\qquad
# \mathbb{E}_{y\sim\pi_\theta}[S(y)]=0
# $$
#
# $S(y)$ が **全トークンの和** であることを覚えておいてください。割る数はどこにもありません。
# 右端の式は、確率の和がいつも 1 であることから出ます。そのおかげで、 $y$ によらない数（ベースライン）を報酬から引いても、期待値は変わりません。

# %%
def true_gradient_of(world, theta, rewards):
    def J(theta):
        return expect(world.log_probs(theta).exp(), rewards).mean()

    return torch.func.grad(J)(theta)


# %%
true_gradient = true_gradient_of(world, theta, rewards)
scores = torch.func.jacrev(lambda theta: world.log_probs(theta)[0])(theta)
scores = scores.flatten(1)  # S(y) を並べた行列 (Y, パラメータの数)
claim("∇J = E[r S]", true_gradient.flatten(), (probs * rewards) @ scores)
claim("E[S] = 0", probs @ scores, 0.0)

# %% [markdown]
# ### ステップ 2：Dr. GRPO の目的関数
#
# 一つのプロンプトに $G$ 個の回答 $y_1,\dots,y_G$ を、互いに独立に $\pi_{\theta_{\mathrm{old}}}$ から引きます。Dr. GRPO のアドバンテージと目的関数は次のとおりです。
#
# $$
# \widehat A^{\mathrm{Dr}}_i=r_i-\frac1G\sum_{j=1}^{G}r_j
# \tag{5.10}
# $$
# $$
# J_{\mathrm{Dr.GRPO}}(\theta)=\mathbb{E}\left[\frac1G\sum_{i=1}^{G}\sum_{t=1}^{|y_i|}\widehat W^{\mathrm{Dr}}_{i,t}(\theta)\right]
# \tag{5.11}
# $$
# $$
# \widehat W^{\mathrm{Dr}}_{i,t}(\theta)=\min\Bigl\{w_{i,t}(\theta)\widehat A^{\mathrm{Dr}}_i,\ \mathrm{clip}\bigl(w_{i,t}(\theta),1-\epsilon,1+\epsilon\bigr)\widehat A^{\mathrm{Dr}}_i\Bigr\}
# \tag{5.12}
# $$
#
# $w_{i,t}(\theta)=\pi_\theta(y_{i,t}\mid x,y_{i,<t})/\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})$ は、トークンの重要度比（式 (5.13)）です。
# 5.3.1 節の GRPO は、アドバンテージを $(r_i-\mathrm{mean})/\mathrm{std}$ とし（式 (5.1)）、 $\frac1G\sum_i\frac1{|y_i|}\sum_t$ で平均しました（式 (5.4)）。違いは、(1) グループの標準偏差で割らないこと、(2) 回答ごとに $1/|y_i|$ を掛けず、トークンについて **和** をとることです（それと、KL の項がありません）。
#
# 引いたばかりなら $\theta=\theta_{\mathrm{old}}$ で、比は 1、クリップは起きません。比を微分すると $\nabla\log\pi_\theta$ なので、一つのグループでの (5.11) の勾配は $\frac1G\sum_i\widehat A^{\mathrm{Dr}}_iS(y_i)$ です。パッケージの `dr_grpo_loss` （中身は「実装」で読みます）で確かめます。 `max_completion_length=1` とすると、式 (5.11) の符号を変えたものになります。

# %%
from companion.losses import dr_grpo_loss, group_advantages

tokens = world.token_log_probs(theta)[0]  # (Y, T)


def one_group(theta, rows, epsilon=0.2):
    logps = world.token_log_probs(theta)[0, rows]
    advantages = group_advantages(rewards[rows], len(rows), scale="none")
    return -dr_grpo_loss(logps, tokens[rows], advantages, world.mask[rows],
                         epsilon, max_completion_length=1)


# %%
rows = torch.tensor([0, 2, 3])  # $、aa$、aaa
by_hand = sum((rewards[i] - rewards[rows].mean()) * scores[i] for i in rows)
claim("式 (5.11) の勾配 = (1/G) Σ Â_i S(y_i)",
      torch.func.grad(one_group)(theta, rows).flatten(), by_hand / G)

# %% [markdown]
# ### ステップ 3：期待値は、ちょうど (1 − 1/G) 倍
#
# グループの平均には **自分自身の報酬** も入っています。そこで、自分の分とほかの分に分けます。
#
# $$
# r_i-\frac1G\sum_{j}r_j=\Bigl(1-\frac1G\Bigr)r_i-\frac1G\sum_{j\ne i}r_j
# $$
#
# **主張** 回答が互いに独立に $\pi_\theta$ から引かれるなら、 $\mathbb{E}[r_iS(y_i)]=\nabla J$、 $j\ne i$ なら $\mathbb{E}[r_jS(y_i)]=\mathbb{E}[r_j]\,\mathbb{E}[S(y_i)]=0$ です。
#
# 64 通りのグループで、 $i,j$ のすべての組について期待値を計算します。

# %%
cross = torch.einsum("n,nj,nid->ijd", chances, rewards[groups],
                     scores[groups])  # E[r_j S(y_i)] を (i, j) に並べる
expected = torch.eye(G)[:, :, None] * true_gradient.flatten()
claim("E[r_j S(y_i)]: i = j なら ∇J、ほかは 0", cross, expected)

# %% [markdown]
# あとは足すだけです。
#
# $$
# \mathbb{E}\left[\frac1G\sum_{i=1}^{G}\widehat A^{\mathrm{Dr}}_i\,S(y_i)\right]=\Bigl(1-\frac1G\Bigr)\nabla J
# $$
#
# 損失の関数を使って、回答の数が 3〜7 の世界と、 $G=2,3,4$ で確かめます。損失はアドバンテージに比例するので、「グループの数 × グループの確率」をアドバンテージに掛けておけば、全グループの平均が期待値になります。

# %%
def weighted_groups(world, logps, rewards, G, scale):
    """全グループの行と、確率の重みを掛けたアドバンテージ (Y^G · G,)。"""
    groups = all_groups(len(logps), G)
    chances = logps.exp()[groups].prod(-1)
    rows = groups.flatten()
    advantages = group_advantages(rewards[rows], G, scale)
    return rows, advantages * (len(groups) * chances).repeat_interleave(G)


# %%
def expected_gradient(world, theta, rewards, G, loss, scale):
    """いまの方策から引いたグループでの、−∇loss の期待値。"""
    def surrogate(theta):
        total = 0.0
        for x, table in enumerate(world.token_log_probs(theta)):
            rows, advantages = weighted_groups(
                world, table.detach().sum(-1), rewards[x], G, scale)
            logps = table[rows]
            total -= loss(logps, logps.detach(), advantages, world.mask[rows])
        return total / world.prompts

    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(surrogate(theta), theta)[0]


# %%
from companion.losses import grpo_loss

EQUATION = {  # 割り算のしかた → 損失（比は 1 なので ε は効かない）
    "和": lambda *rows: dr_grpo_loss(*rows, 0.2, max_completion_length=1),
    "長さで割る": lambda *rows: grpo_loss(*rows, 0.2),
}

# %%
for letters, longest in ((1, 2), (1, 3), (1, 4), (1, 5), (2, 2)):
    small = World(prompts=1, letters=letters, max_length=longest)
    logits, r = small.random_logits(g), small.random_rewards(g)
    truth = true_gradient_of(small, logits, r)
    for n in (2, 3, 4):
        found = expected_gradient(small, logits, r, n, EQUATION["和"], "none")
        claim(f"Y = {len(small.responses)}、G = {n}: (1 − 1/{n})∇J",
              found, (1 - 1 / n) * truth)

# %% [markdown]
# 向きは、本当の勾配とまったく同じです。大きさだけが $(1-1/G)$ 倍になります。 $G=2$ なら半分、 $G=8$ なら 0.875 倍です。自分の報酬をベースラインに混ぜた分だけ、自分の功績を割り引いてしまうのです。
# 定数倍なので、学習率に吸収できます。プロンプトによって変わる量でもありません。

# %% [markdown]
# ### ステップ 4：RLOO との関係
#
# 自分を除いた平均をベースラインにするのが RLOO（REINFORCE leave-one-out）です。 $\widehat A^{\mathrm{RLOO}}_i=r_i-\frac1{G-1}\sum_{j\ne i}r_j$ とします。
#
# **主張** 期待値をとるまでもなく、どのグループのどの回答でも $\widehat A^{\mathrm{RLOO}}_i=\frac{G}{G-1}\widehat A^{\mathrm{Dr}}_i$ です。
#
# ステップ 3 の式の両辺を $G/(G-1)$ 倍するだけです。だから RLOO の勾配の期待値は、ちょうど $\nabla J$ です。64 通りのグループすべてで確かめます。

# %%
group_rewards = rewards[groups]
others = torch.stack([
    group_rewards[:, [j for j in range(G) if j != i]].mean(-1)
    for i in range(G)
], dim=-1)  # 自分を除いた平均 (64, G)

# %%
rloo = group_rewards - others
dr = group_advantages(group_rewards.flatten(), G, scale="none").view(-1, G)
claim("RLOO のアドバンテージ = G/(G−1) × Dr. GRPO のもの",
      rloo, G / (G - 1) * dr)

# %%
found = torch.einsum("n,ni,nid->d", chances, rloo, scores[groups]) / G
claim("RLOO の勾配の期待値 = ∇J", found, true_gradient.flatten())


# %% [markdown]
# ### ステップ 5：条件を外すとどうなるか
#
# ここまでの等式には、3 つの条件がありました。 **(a)** 対数確率をトークンについて足すこと、 **(b)** 回答をいまの方策 $\pi_\theta$ から引くこと、 **(c)** 回答を互いに独立に引くこと、です。(a) はステップ 7 で見ます。(b) と (c) を外して、本当の勾配との **角度** を測りましょう。

# %%
import math


def angle(u, v):
    """2 つの勾配のなす角度（度）。0 に近くても桁が落ちない式で。"""
    u, v = u.flatten() / u.norm(), v.flatten() / v.norm()
    return math.degrees(2 * torch.atan2((u - v).norm(), (u + v).norm()))


# %% [markdown]
# まず (b)。古い方策 $\pi_{\theta_{\mathrm{old}}}$ から引いたグループの、(5.11) の勾配です（クリップが起きないように、 $\epsilon$ をとても大きくします）。
# トークンの比 $w_{i,t}$ は、そのトークンの前（接頭辞）と後ろ（続き）が古い方策から引かれたことを直しません。系列の比 $\pi_\theta(y_i\mid x)/\pi_{\theta_{\mathrm{old}}}(y_i\mid x)$ なら直ります（回答がどれも 1 トークンなら、2 つの比は同じものです）。

# %%
old_theta = theta + world.random_logits(g, scale=0.7)
old_tokens = world.token_log_probs(old_theta)[0]
rows, advantages = weighted_groups(
    world, old_tokens.sum(-1), rewards, G, "none")


def off_policy(theta):
    logps = world.token_log_probs(theta)[0, rows]
    return -dr_grpo_loss(logps, old_tokens[rows], advantages,
                         world.mask[rows], 1e9, max_completion_length=1)


# %%
by_token = torch.func.grad(off_policy)(theta)
old_chances = old_tokens.sum(-1).exp()[groups].prod(-1)
weight = (probs / old_tokens.sum(-1).exp())[groups]  # 系列の重要度比
by_sequence = torch.einsum("n,ni,nid->d", old_chances, weight * dr,
                           scores[groups]) / G

# %%
claim("系列の比なら (1 − 1/G)∇J", by_sequence,
      (1 - 1 / G) * true_gradient.flatten())
turned = angle(by_token, true_gradient)
check("この例では、トークンの比だと向きがずれる", turned > 2,
      f"{turned:.1f} 度")

# %% [markdown]
# 次に (c)。同じ回答が 2 つ出たら引き直す、つまり、3 つとも違うグループだけを使うことにします。多様な回答を集めたくて、やってみたくなる工夫です。

# %%
distinct = torch.tensor([len(set(row)) == G for row in groups.tolist()])
kept = torch.where(distinct, chances, 0.0)
found = torch.einsum("n,ni,nid->d", kept / kept.sum(), dr, scores[groups])
turned = angle(found, true_gradient)
check("この例では、独立に引かないと向きがずれる", turned > 2,
      f"{turned:.1f} 度")

# %% [markdown]
# ### ステップ 6：標準偏差で割ると
#
# ここからは、GRPO の 2 つの割り算を、一つずつ足してみます。まず、アドバンテージを標準偏差で割ります（TRL と同じく、 $G-1$ で割る不偏分散の平方根に、 $10^{-4}$ を足します）。
#
# **主張** 報酬が 0 か 1 で、プロンプトが一つなら、勾配の期待値は $\nabla J$ の **正の定数倍** です。つまり、向きは変わりません。
#
# 正解が $k$ 個のグループでは、正解の回答のアドバンテージはどれも同じ、間違いの回答のアドバンテージもどれも同じです。正解率を $p$ とすると $\mathbb{E}[S\mid r=1]=\nabla p/p$、 $\mathbb{E}[S\mid r=0]=-\nabla p/(1-p)$ なので、 $k$ が何であっても $\nabla p$ の倍数になります。 $k\sim\mathrm{Bin}(G,p)$ で平均すると、その倍率は
#
# $$
# w_G(p)=\frac{1}{p(1-p)}\,\mathbb{E}_k\left[\frac{k(G-k)}{G^2(s_k+10^{-4})}\right],\qquad s_k=\sqrt{\frac{k(G-k)}{G(G-1)}}
# $$
#
# です。長さがまちまちな世界（ `$`、`a$`、`aa$`、`aaa` ）で、2 つ目と 4 つ目を正解として確かめます。

# %%
def std_weight(G, p):
    """標準偏差で割ることが、正解率 p のプロンプトの勾配に掛ける倍率。"""
    k = torch.arange(1, G, dtype=torch.float64)
    ways = double([math.comb(G, i) for i in range(1, G)])
    chance = ways * p**k * (1 - p) ** (G - k)
    std = (k * (G - k) / (G * (G - 1))).sqrt()
    spread = k * (G - k) / (G**2 * (std + 1e-4))
    return (chance * spread).sum() / (p * (1 - p))


# %%
binary = double([[0.0, 1.0, 0.0, 1.0]])
p = (probs * binary[0]).sum()
grad_p = true_gradient_of(world, theta, binary)
for n in (2, 3, 4, 6):
    found = expected_gradient(
        world, theta, binary, n, EQUATION["和"], "group")
    claim(f"G = {n}、p = {p:.3f}: w_G(p)∇J", found,
          std_weight(n, p) * grad_p)

# %% [markdown]
# 向きが変わるのは、どんなときでしょうか。 **正解率の違うプロンプト** が混ざったときと、 **報酬が 3 種類以上** あるときです。
#
# プロンプトが複数なら、勾配は、それぞれのプロンプトの勾配を $w_G(p)$ で重みづけた平均になります。正解率が同じなら、重みも同じなので、向きは変わりません。 $G=2,3$ でも、重みは $p$ によりません（報酬がそろわない $k$ では、標準偏差がいつも同じになるからです）。 $G\ge4$ では、正解率が 0 や 1 に近いほど、重みが大きくなります。

# %%
p_grid = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
weights = {n: torch.stack([std_weight(n, p) for p in p_grid])
           for n in (2, 3, 4, 8, 32)}
for n in (2, 3):
    claim(f"G = {n} の重みは p によらない", weights[n], weights[n][0])
for n in (4, 8, 32):
    rise = (weights[n] / std_weight(n, 0.5))[3]  # p = 0.05
    check(f"G = {n}: p = 0.05 の重みは、0.5 の重みより大きい", rise > 1.05,
          f"{rise:.3f} 倍")

# %% [markdown]
# 重みの違いは、角度にも現れます。正解率が 0.05 と 0.5 の 2 つのプロンプトで、角度を測りましょう。回答は 1 トークン（a、b、 `$` ）だけにして、長さの影響を除きます。正解は `$` です。

# %%
def with_probs(world, table):
    """回答の確率の表 (X, Y) を持つ方策のロジット。"""
    return world.logits_of(double(table).log())


# %%
letters = World(prompts=2, letters=2, max_length=1)
hard_easy = with_probs(letters, [[0.05, 0.55, 0.4], [0.5, 0.3, 0.2]])
correct = double([[1, 0, 0], [1, 0, 0]])
two_truths = true_gradient_of(letters, hard_easy, correct)

# %%
std_angles = {}
for n in (2, 3, 4, 8, 16, 64):
    w = torch.stack([std_weight(n, p) for p in (0.05, 0.5)])
    by_formula = w[:, None, None] * two_truths
    if n <= 8:  # 3^8 = 6,561 通りまでは、数え上げて確かめる
        found = expected_gradient(
            letters, hard_easy, correct, n, EQUATION["和"], "group")
        claim(f"G = {n}: 数え上げ = w_G(p) で重みづけた平均",
              found, by_formula)
    std_angles[n] = angle(by_formula, two_truths)

# %%
from companion.plots import COLOURS, GREY, figure

drawn, (axes,) = figure(1, 2, panel=(4.4, 3.1))
for n, shade in ((3, 0), (4, 0.35), (8, 0.65), (32, 1)):
    axes[0].plot(p_grid, weights[n] / std_weight(n, 0.5),
                 color=COLOURS[3] if shade else GREY, alpha=shade or 1,
                 label="G = 2、3" if n == 3 else f"G = {n}")
axes[0].set(title="標準偏差で割ることが与える重み", xlabel="正解率 p",
            ylabel="w(p) / w(0.5)")
axes[0].legend(loc="upper center")
axes[1].plot(*zip(*std_angles.items(), strict=True), "o-", color=COLOURS[3])
axes[1].set(title="2 問（p = 0.05 と 0.5）での向きのずれ",
            xlabel="G（対数目盛り）", xscale="log",
            ylabel="本当の勾配との角度（度）")
axes[1].set_xticks(list(std_angles), list(std_angles))
axes[1].minorticks_off()
drawn

# %%
check("G = 2、3 では向きが変わらない",
      max(std_angles[2], std_angles[3]) < 1e-6)
check("G = 4 から変わり、G が大きいほど大きい",
      0.3 < std_angles[4] < std_angles[8] - 1 < std_angles[64] - 3,
      "、".join(f"{std_angles[n]:.2f} 度" for n in (4, 8, 64)))

# %%
even = with_probs(letters, [[0.5, 0.3, 0.2], [0.5, 0.1, 0.4]])
found = expected_gradient(letters, even, correct, 8, EQUATION["和"], "group")
same_p = angle(found, true_gradient_of(letters, even, correct))
check("正解率が同じなら変わらない", same_p < 1e-6, f"{same_p:.0e} 度")

# %% [markdown]
# 報酬が 3 種類以上になると、プロンプトが一つでも、一般に向きが変わります。 $G=2$ を考えると分かりやすいでしょう。2 つの報酬の差を標準偏差で割ると、残るのは **どちらが高いか** だけで、差の大きさは消えてしまいます（ $10^{-4}$ の分を除きます）。
# 報酬が 1、0.2、0 の 3 つの回答（確率は 0.1、0.6、0.3）で測ります。

# %%
one_letter = World(prompts=1, letters=2, max_length=1)
three = with_probs(one_letter, [[0.1, 0.6, 0.3]])
graded = double([[1.0, 0.2, 0.0]])
truth = true_gradient_of(one_letter, three, graded)

# %%
graded_angles = {}
for n in (2, 4, 8):
    found = expected_gradient(
        one_letter, three, graded, n, EQUATION["和"], "group")
    graded_angles[n] = angle(found, truth)
    check(f"3 種類の報酬、G = {n}: 向きが変わる", graded_angles[n] > 20,
          f"{graded_angles[n]:.1f} 度")
check("G が大きいほど、ずれは小さい",
      graded_angles[2] > graded_angles[4] + 1 > graded_angles[8] + 2)

# %% [markdown]
# プロンプトが一つなら、 $G$ を増やすとグループの標準偏差はどれも同じ値（報酬の標準偏差）に近づくので、ずれは 0 に近づいていきます。正解率の違うプロンプトが混ざったときは、反対に大きくなるのでした。

# %% [markdown]
# ### ステップ 7：長さで割ると
#
# こんどは、標準偏差では割らず、 $1/|y_i|$ だけを掛けます。
#
# **主張** 回答が互いに独立に $\pi_\theta$ から引かれるなら、どの $G$ でも
#
# $$
# \mathbb{E}\left[\frac1G\sum_{i=1}^{G}\widehat A^{\mathrm{Dr}}_i\frac{S(y_i)}{|y_i|}\right]=\Bigl(1-\frac1G\Bigr)\mathbb{E}_{y\sim\pi_\theta}\left[\bigl(r(y)-J\bigr)\frac{S(y)}{|y|}\right]
# $$
#
# です。ステップ 3 と同じように分けると、 $j\ne i$ の項は $\mathbb{E}[r_j]\,\mathbb{E}[S/|y|]=J\,\mathbb{E}[S/|y|]$ で、こんどは 0 になりません。右辺の括弧の中に $G$ がないので、 **向きは $G$ によりません**。 $G$ を増やしても、ずれは減らないのです。

# %%
length = world.mask.sum(-1)
per_token = scores / length[:, None]  # S(y)/|y|
mean_reward = probs @ rewards
right = (probs * (rewards - mean_reward)) @ per_token

# %%
length_angles = {}
for n in (2, 3, 4, 6):
    found = expected_gradient(
        world, theta, rewards[None], n, EQUATION["長さで割る"], "none")
    claim(f"G = {n}: (1 − 1/G) E[(r − J) S/|y|]", found.flatten(),
          (1 - 1 / n) * right)
    length_angles[n] = angle(found, true_gradient)
check("どの G でも同じだけ、向きが変わる",
      max(length_angles.values()) - min(length_angles.values()) < 1e-6
      and min(length_angles.values()) > 5, f"{length_angles[2]:.2f} 度")

# %% [markdown]
# しかも、 **ベースラインが害のないものではなくなります**。トークンの和なら $\mathbb{E}[b\,S]=0$ なので、どんな定数 $b$ を引いても期待値は同じでした。 $1/|y|$ を掛けると、 $\mathbb{E}[S/|y|]\ne0$ なので、 $b$ の値によって向きが変わります。

# %%
shift = probs @ per_token
check("E[S/|y|] は 0 ではない", shift.norm() > 0.01,
      f"ノルム {shift.norm():.3f}（E[S] なら {(probs @ scores).norm():.0e}）")

# %%
by_baseline = {
    b: angle((probs * (rewards - b)) @ per_token, true_gradient)
    for b in (-1.0, 0.0, mean_reward.item(), 1.0)
}
for b, turned in by_baseline.items():
    print(f"b = {b:6.3f} のとき {turned:6.2f} 度")
check("ベースラインによって向きが変わる",
      max(by_baseline.values()) - min(by_baseline.values()) > 20)

# %% [markdown]
# 長さがそろっていれば、 $1/|y|$ は定数倍なので、何も起きません（下の表では、どの回答も 1 トークンの世界で代表させます）。2 つの割り算を別々に、また一緒に入れたときの角度（度）を、6 つの場合の表にします。 $G=6$ とします。

# %%
import pandas as pd

pair = World(prompts=2, letters=1, max_length=3)
mixed = with_probs(pair, [[0.05, 0.3, 0.4, 0.25], [0.5, 0.2, 0.2, 0.1]])

# %%
WORLDS = {  # 名前 → (世界, ロジット, 報酬)
    "0/1、1 問、1 トークン": (one_letter, three, correct[:1]),
    "0/1、2 問（p = .05、.5）、1 トークン": (letters, hard_easy, correct),
    "3 種類、1 問、1 トークン": (one_letter, three, graded),
    "0/1、1 問、長さがまちまち": (world, theta, binary),
    "0/1、2 問（p = .05、.5）、長さがまちまち": (
        pair, mixed, double([[1, 0, 0, 0]] * 2)),
    "実数、1 問、長さがまちまち": (world, theta, rewards[None]),
}

# %%
SWITCHES = {  # 割り算 → (損失, アドバンテージの割り方)
    "Dr. GRPO": ("和", "none"),
    "標準偏差だけ": ("和", "group"),
    "1/|y| だけ": ("長さで割る", "none"),
    "両方（GRPO）": ("長さで割る", "group"),
}


# %%
def angles_of(case, G):
    truth = true_gradient_of(*case)
    return {
        name: angle(expected_gradient(*case, G, EQUATION[loss], scale), truth)
        for name, (loss, scale) in SWITCHES.items()
    }


angle_table = pd.DataFrame(
    {name: angles_of(case, 6) for name, case in WORLDS.items()}).T
angle_table.round(2)

# %%
check("Dr. GRPO は、どの場合も 0 度", angle_table["Dr. GRPO"].max() < 1e-6,
      f"最大 {angle_table['Dr. GRPO'].max():.0e} 度")

# %%
turns = angle_table > 1
turns_expected = {
    "標準偏差だけ": [False, True, True, False, True, True],
    "1/|y| だけ": [False, False, False, True, True, True],
}
for name, pattern in turns_expected.items():
    check(f"{name}: ずれる場合とずれない場合",
          turns[name].tolist() == pattern
          and angle_table[name][~turns[name]].max() < 1e-6)

# %%
tints = dict(zip(SWITCHES, [COLOURS[0], COLOURS[3], COLOURS[4], COLOURS[1]],
                 strict=True))
styles = dict(zip(SWITCHES, ["-", "-", "-", "--"], strict=True))

# %%
sizes = (2, 3, 4, 5, 6)
drawn, (axes,) = figure(1, 3, panel=(3.5, 3.0))
for ax, name in zip(axes, [list(WORLDS)[i] for i in (2, 4, 5)],
                    strict=True):
    lines = pd.DataFrame([angles_of(WORLDS[name], n) for n in sizes])
    for switch in SWITCHES:
        ax.plot(sizes, lines[switch], styles[switch], marker="o",
                markersize=4, color=tints[switch], label=switch,
                linewidth=5 if switch == "Dr. GRPO" else 1.9,
                alpha=0.4 if switch == "Dr. GRPO" else 1)
    ax.set(title=name.replace("（p = .05、.5）", ""), xlabel="G",
           ylabel="本当の勾配との角度（度）", ylim=(-3, 50))
    ax.set_xticks(sizes, sizes)
axes[0].legend(loc="lower left", bbox_to_anchor=(0, 0.06))
drawn

# %% [markdown]
# 2 つの割り算のずれは、別々のものです。標準偏差のずれは、報酬の種類と正解率の組み合わせで決まり、 $G$ で変わります。長さのずれは、長さがまちまちなら、どの $G$ でも同じです。一緒に入れたときの角度は、2 つの角度の和にはなりません。

# %%
last_row = angle_table.iloc[-1]
together, alone = last_row["両方（GRPO）"], last_row[list(SWITCHES)[1:3]]
check("実数の報酬: 片方だけより大きいが、2 つの和より小さい",
      alone.max() + 5 < together < alone.sum() - 5,
      f"{together:.1f} 度（別々には {alone.iloc[0]:.1f} 度と "
      f"{alone.iloc[1]:.1f} 度）")

# %% [markdown]
# ### ステップ 8：悪い回答ほど長くなる
#
# $1/|y|$ のずれは、どこへ向かうのでしょうか。長さと報酬だけを取り出した、もう一つの小さな言語を作ります。
#
# 回答は、**一つの文字（文体）を何度か繰り返して、EOS を書く** だけです。最初に文体 a か b を選び、そのあとは一歩ごとに、確率 $h_s$ でやめ、確率 $1-h_s$ で同じ文字をもう一度書きます（ $s$ は文体）。 $L$ トークンになったら打ち切ります。
# 報酬は、文体 a なら確率 0.7、b なら確率 0.3 で 1、それ以外は 0 です。長さは **報酬にまったく関係しません**。
# パラメータは、文体のロジット 2 つと、 $h_s$ のロジット 2 つだけです。はじめは、文体は五分五分、 $h_s=0.25$ とします。

# %%
from torch.nn.functional import logsigmoid

L = 24
spot, times = torch.arange(L), torch.arange(L)[:, None]
repeats = (1 <= spot) & (spot <= times)  # もう一度書く場所 (L, L)
ends = spot == times + 1  # やめる場所。最後の行は打ち切られて、EOS がない
style_mask = spot <= times + 1
style_length = style_mask.sum(-1)  # 2, 3, …, L, L

# %%
def style_tokens(begin, stop):
    """全 2L 通りの回答のトークンの対数確率 (…, 文体, L, L)。"""
    begin = begin.log_softmax(-1)[..., None, None]
    stop = stop[..., None, None]
    return (begin * (spot == 0) + logsigmoid(-stop) * repeats
            + logsigmoid(stop) * ends)


# %%
PAYS = double([0.7, 0.3])  # 文体 a、b の報酬が 1 になる確率
even_begin = double([0.0, 0.0])
start_stop = double([math.log(0.25 / 0.75)] * 2)


def expected_lengths(logps):
    """文体ごとの、長さの期待値 (…, 文体)。logps は (…, 文体, L)。"""
    within = logps.softmax(-1)  # 文体が決まったときの条件付き確率
    return (within * style_length).sum(-1)


# %%
style_logps = style_tokens(even_begin, start_stop).sum(-1)
claim("2L 通りの確率の和は 1", style_logps.exp().sum(), 1.0)
print("はじめの長さの期待値:", expected_lengths(style_logps).numpy().round(3))

# %% [markdown]
# 勾配の期待値を計算しましょう。報酬が文体だけで決まるので、アドバンテージの期待値も文体だけで決まります。これを $a_s=\mathbb{E}[\widehat A_i\mid \text{文体 } s]$ と書くと、Dr. GRPO のアドバンテージでは $a_s=(1-1/G)(q_s-p)$ です（ $q_s$ は文体 $s$ の報酬が 1 になる確率、 $p$ は全体の正解率）。
#
# **主張** $h_s$ のロジット $u_s$ についての勾配の期待値は、トークンの和（Dr. GRPO）では 0 です（文体ごとに、スコア関数の期待値が 0 なので）。 $1/|y|$ を掛けると
#
# $$
# \pi(s)\,a_s\,\mathrm{Cov}\Bigl(\frac1{|y|},\ \frac{\partial\log\pi(|y|\mid s)}{\partial u_s}\Bigr)
# $$
#
# です。短い回答ほど $1/|y|$ が大きく、 $u_s$ を上げると短い回答の確率が上がるので、この共分散は正です。だから $a_s<0$ の文体は $u_s$ が **下がって長く** なり、 $a_s>0$ の文体は短くなります。
#
# 損失の関数を使って確かめます。全 2L 通りの回答に、確率と $a_s$ を掛けたアドバンテージを渡します。

# %%
def flow(begin, stop, a, loss):
    """勾配の期待値。a は文体ごとのアドバンテージの期待値 (2,)。"""
    begin, stop = (v.clone().requires_grad_() for v in (begin, stop))
    logps = style_tokens(begin, stop).flatten(0, 1)  # (2L, L)
    chance = logps.detach().sum(-1).exp()
    surrogate = -loss(logps, logps.detach(),
                      2 * L * chance * a.repeat_interleave(L),
                      style_mask.repeat(2, 1))
    return torch.autograd.grad(surrogate, (begin, stop))


# %%
a_dr = (1 - 1 / G) * (PAYS - 0.5)  # はじめは p = 0.5。G は 3
by_sum = flow(even_begin, start_stop, a_dr, EQUATION["和"])
by_length = flow(even_begin, start_stop, a_dr, EQUATION["長さで割る"])

spread_of = style_logps.softmax(-1)  # π(|y| | s)  (2, L)
slope = torch.stack([  # ∂log π(|y| | s)/∂u_s。やめれば 1 − h、続ければ −h
    ends.sum(-1) - 0.25 * (ends | repeats).sum(-1)] * 2)
inverse = 1 / style_length.double()
covariance = (spread_of * inverse * slope).sum(-1) - (
    (spread_of * inverse).sum(-1) * (spread_of * slope).sum(-1))

# %%
claim("Dr. GRPO: h のロジットの勾配は 0", by_sum[1], 0.0, tol=1e-12)
claim("1/|y|: π(s) a_s Cov", by_length[1], 0.5 * a_dr * covariance)
good, bad = by_length[1]
check("良い文体は短く、悪い文体は長くなる向き", good > 0.005 > -0.005 > bad,
      f"h のロジットの勾配 {good:+.4f}、{bad:+.4f}")

# %% [markdown]
# 間違えた長い回答は、1 トークンあたりの罰が小さくてすみます。だから GRPO は、間違えるなら長く間違えるように、方策を動かします。論文は、これを長さのバイアスと呼びました。実験 1 で、学習の中で見ます。

# %% [markdown]
# ## 実装
#
# 式 (5.10)〜(5.12) を、そのまま NumPy で書きます。引数は、回答ごとの「トークンの対数確率の列」です。長さはまちまちなので、リストに入れて渡します。

# %%
import numpy as np


def advantages_numpy(rewards, G):
    advantages = []
    for start in range(0, len(rewards), G):
        group = rewards[start:start + G]
        advantages += [r - sum(group) / G for r in group]  # (5.10)
    return advantages


# %%
def dr_grpo_loss_numpy(logps, old_logps, advantages, epsilon, L):
    total = 0.0
    for i in range(len(logps)):
        for t in range(len(logps[i])):
            w = np.exp(logps[i][t] - old_logps[i][t])
            clipped = min(max(w, 1 - epsilon), 1 + epsilon)
            total += min(w * advantages[i], clipped * advantages[i])  # (5.12)
    return -total / (len(logps) * L)  # L = 1 なら (5.11)


# %% [markdown]
# 式 (5.11) の $1/G$ とプロンプトの平均を合わせると、行の数 B で割ることになります。 `L` は、TRL がさらに割る定数です。
#
# パッケージの関数は、同じ式をベクトルで書いた PyTorch 版です（説明文は省いて表示します）。入力の検査のあと、最後の数行が式です。 `clipped_surrogate` は、式 (5.12) の $\min$ と clip で、GRPO の仲間が共有しています。

# %%
import inspect
import re

from companion.losses.surrogate import clipped_surrogate

for function in (dr_grpo_loss, clipped_surrogate):
    code = inspect.getsource(function)
    print(re.sub(r'    """.*?"""\n', "", code, flags=re.DOTALL))

# %% [markdown]
# 2 つのグループ、長さの違う 8 つの回答で、2 つの実装を比べます。比が 1 から離れ、クリップされるトークンもあるように、古い対数確率を乱数でずらします。

# %%
rng = np.random.default_rng(0)
lengths = [3, 1, 6, 2, 4, 8, 2, 5]
listed = [-rng.exponential(1.0, n) for n in lengths]
old_listed = [row + rng.normal(0, 0.4, len(row)) for row in listed]
outcomes = [1.0, 0.0, 0.0, 0.5, 2.0, -1.0, 0.0, 1.0]

# %%
def padded(rows, width, fill=0.0):
    """リストを (B, width) のテンソルにし、右に詰め物をする。"""
    table = torch.full((len(rows), width), fill, dtype=torch.float64)
    for i, row in enumerate(rows):
        table[i, :len(row)] = torch.as_tensor(row)
    return table


mask = padded([np.ones(n) for n in lengths], 8)
A = group_advantages(double(outcomes), 4, scale="none")

# %%
claim("アドバンテージ: NumPy = PyTorch", advantages_numpy(outcomes, 4), A,
      tol=1e-12)


# %%
batch = padded(listed, 8), padded(old_listed, 8), A, mask
for size in (1, 16, 512):
    claim(f"損失、L = {size}: NumPy = PyTorch",
          dr_grpo_loss_numpy(listed, old_listed, A.numpy(), 0.2, size),
          dr_grpo_loss(*batch, 0.2, size), tol=1e-12)
ratio = np.exp(np.concatenate(listed) - np.concatenate(old_listed))
print(f"クリップの範囲を出たトークン: {np.mean(abs(ratio - 1) > 0.2):.0%}")

# %% [markdown]
# 詰め物の幅を広げても、詰め物のところに何が入っていても（NaN でも）、損失は変わりません。勾配は、数値微分と比べます（`gradcheck`）。

# %%
wide = padded(listed, 20, math.nan), padded(old_listed, 20, math.nan)
wide_mask = padded([np.ones(n) for n in lengths], 20)
claim("幅 20 に広げても同じ", dr_grpo_loss(*wide, A, wide_mask, 0.2, 16),
      dr_grpo_loss(*batch, 0.2, 16), tol=1e-12)


# %%
leaf = batch[0].clone().requires_grad_()
check("自動微分の勾配 = 数値微分の勾配", torch.autograd.gradcheck(
    lambda logps: dr_grpo_loss(logps, *batch[1:], 0.2, 16), leaf))

# %% [markdown]
# 手計算とも合わせましょう。アドバンテージが $+1$ と $-1$、長さが 2 と 8、比は 1 とします。足すと $2-8=-6$ なので、式 (5.11) の損失は $6/2=3$、 $L=10$ で割れば 0.3 です。
# 同じバッチで、GRPO は $1-1=0$ の平均で 0、DAPO（5.3.3 節。全トークンの平均です）は $6/10=0.6$ です。

# %%
from companion.losses import dapo_loss

plus_minus = double([1.0, -1.0])
zeros = torch.zeros(2, 8, dtype=torch.float64)
two_and_eight = torch.arange(8) < torch.tensor([[2], [8]])
example = zeros, zeros, plus_minus, two_and_eight
claim("Dr. GRPO: L = 1、10", [dr_grpo_loss(*example, 0.2, size)
                              for size in (1, 10)], [3.0, 0.3], tol=1e-12)
claim("GRPO", grpo_loss(*example, 0.2), 0.0, tol=1e-12)
claim("DAPO", dapo_loss(*example, 0.2, 0.28), 0.6, tol=1e-12)

# %%
claim("[1, 0, 0, 0] のアドバンテージ",
      group_advantages([1, 0, 0, 0], 4, scale="none"),
      [0.75, -0.25, -0.25, -0.25])


# %%
same = group_advantages([0.1] * 7, 7, scale="none")
claim("報酬がみな 0.1 なら、ちょうど 0", same, 0.0, tol=0.0)
nothing = dr_grpo_loss(zeros, zeros, plus_minus, torch.zeros(2, 8), 0.2, 10)
claim("トークンが一つもなければ、損失は 0", nothing, 0.0)

# %% [markdown]
# クリップの 4 つの場合です。比 $w$ とアドバンテージから、目的関数の値と、その $\log w$ についての微分を手で出せます（ $\epsilon=0.2$ ）。

# %%
for w, a, value, slope_by_hand in ((1.5, 1, 1.2, 0.0), (1.5, -1, -1.5, -1.5),
                                   (0.5, 1, 0.5, 0.5), (0.5, -1, -0.8, 0.0)):
    log_w = double([[math.log(w)]]).requires_grad_()
    objective = -dr_grpo_loss(log_w, double([[0.0]]), double([a]),
                              torch.ones(1, 1), 0.2, 1)
    (by_autograd,) = torch.autograd.grad(objective, log_w)
    claim(f"w = {w}、Â = {a:+d}", [objective.item(), by_autograd.item()],
          [value, slope_by_hand])

# %% [markdown]
# 入力の間違いは、場所を言うエラーになります。

# %%
def error_of(build):
    try:
        build()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "エラーになりません"


# %%
broken = batch[0].clone()
broken[2, 1] = -torch.inf
for words, build in {
    "logps[2, 1] is -inf": lambda: dr_grpo_loss(broken, *batch[1:], 0.2, 16),
    "G ≥ 2": lambda: group_advantages([1.0, 0.0], 1, scale="none"),
    "max_completion_length": lambda: dr_grpo_loss(*batch, 0.2, 0),
}.items():
    message = error_of(build)
    check("エラーになる", words in message, message)

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じ回答で、損失と勾配を比べる
#
# 相手は TRL の `GRPOTrainer` そのものです。パッケージの `trl_grpo` は、生成する代わりにこちらの決めた回答を、採点する代わりにこちらの決めた報酬を渡し、その先（アドバンテージ、古い方策の対数確率、損失、勾配）は TRL に計算させます。
# 回答を差し替える入口（ `rollout_func` ）は TRL の実験的な機能なので、その警告はここで止めておきます。

# %%
import logging
import warnings

from companion.lm import load

warnings.filterwarnings("ignore", message=".*rollout_func")
logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)

old_model, tokenizer = load("prime-sums", dtype=torch.float64)

# %%
model, _ = load("prime-sums", dtype=torch.float64)
noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in model.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=noise,
                                     dtype=weight.dtype)

# %% [markdown]
# 問題は 2 つ、回答は 4 つずつで、長さはまちまちです。最後の回答は、EOS がない（打ち切られた）ものとします。
# 2 つのプロンプトの長さはそろえました。TRL は位置を左の詰め物から数え、回転位置埋め込み（RoPE）の角度は float64 のモデルでも float32 で計算されるので、長さが違うと 1e-7 ほどずれるからです。

# %%
ANSWERS = {"20未満の素数の合計は？": ["77", "78", "97", "7"],
           "30未満の素数の合計は？": ["129", "127", "129", "12"]}
asked = [x for x in ANSWERS for _ in range(4)]
answered = [y for ys in ANSWERS.values() for y in ys]

# %%
prompt_ids = tokenizer(asked)["input_ids"]
completion_ids = [ids + [tokenizer.eos_token_id]
                  for ids in tokenizer(answered)["input_ids"]]
completion_ids[-1].pop()  # 打ち切り
right_or_wrong = [1.0, 0, 0, 0, 1, 0, 1, 0]

# %%
from companion.oracle import trl_grpo


def by_trl(rewards=right_or_wrong, completions=completion_ids,
           rows=slice(None), **changes):
    page = dict(loss_type="dr_grpo", importance_sampling_level="token",
                scale_rewards="none", beta=0.0, epsilon=0.2,
                max_completion_length=16, num_generations=4)
    return trl_grpo(model, old_model, old_model, prompt_ids[rows],
                    completions[rows], rewards[rows], tokenizer,
                    **(page | changes))


# %% [markdown]
# こちらは、同じモデルから対数確率を求めて `dr_grpo_loss` に渡すだけです。アドバンテージも、こちらで計算します。

# %%
from companion.lm import token_log_probs


def by_us(batch, rewards=right_or_wrong, old=old_model, size=16):
    """NumPy 版の損失、torch の損失、全パラメータの勾配。"""
    mask = batch["completion_mask"]
    logps = token_log_probs(model, **batch)
    old_logps = token_log_probs(old, **batch).detach()
    scored = double([math.nan if r is None else r for r in rewards])
    A = group_advantages(scored, 4, scale="none")
    loss = dr_grpo_loss(logps, old_logps, A, mask, 0.2, size)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    rows = [[row[kept].numpy()
             for row, kept in zip(x, mask.bool(), strict=True)]
            for x in (logps.detach(), old_logps)]
    in_numpy = dr_grpo_loss_numpy(*rows, A.numpy(), 0.2, size)
    return in_numpy, loss.item(), dict(zip(names, gradients, strict=True))


# %% [markdown]
# TRL は、一度の生成で何度も更新するとき（ `num_iterations=2` など）だけ、古い方策の対数確率を使います（方策オフ）。既定の 1 では、古い方策が何であっても、比を 1 とみなします（方策オン）。
# 報酬関数が None を返した回答は「採点なし」です。グループの平均から除かれ、アドバンテージは 0 になりますが、分母の B には残ります。

# %%
off = dict(num_iterations=2)
unscored = [1.0, None, 0, None, 1, 0, 1, 0]
CASES = {  # 名前 → (TRL への設定, こちらへの設定)
    "方策オン": (dict(), dict(old=model)),
    "方策オフ": (off, dict()),
    "方策オフ、L = 512": (
        off | dict(max_completion_length=512), dict(size=512)),
    "方策オフ、打ち切りを除く": (
        off | dict(mask_truncated_completions=True), dict()),
    "方策オフ、採点なし（None）": (
        off | dict(rewards=unscored), dict(rewards=unscored)),
}

# %%
results, parity, worst = {}, {}, []
for name, (theirs, mine) in CASES.items():
    result = results[name] = by_trl(**theirs)
    in_numpy, loss, gradients = by_us(result.batch, **mine)
    parity[name] = in_numpy, loss, result.loss.item()
    worst.append(max((gradients[n] - result.gradients[n]).abs().max().item()
                     for n in gradients))

# %%
check("全パラメータの勾配が一致", max(worst) <= 1e-12,
      f"{len(worst)} 通りで最大差 {max(worst):.0e}")
parity = pd.DataFrame(parity, index=["NumPy", "torch", "TRL"]).T

# %%
gaps = parity.max(axis=1) - parity.min(axis=1)
check("NumPy = torch = TRL", gaps.max() <= 1e-12, f"最大差 {gaps.max():.0e}")
parity = parity.map("{:.12f}".format)
parity["最大差"] = gaps.map("{:.0e}".format)
parity["クリップの割合"] = [
    f"{results[name].metrics['clip_ratio/region_mean']:.3f}"
    for name in parity.index]
parity

# %%
claim("アドバンテージ: こちら = TRL",
      group_advantages(right_or_wrong, 4, scale="none"),
      results["方策オフ"].advantages)

# %% [markdown]
# ### サポートページのコードを CPU で動かす
#
# サポートページの例を、ノート PC の CPU で動かします。データは 1 行、報酬は「数字だけの回答が正解と一字一句同じなら 1」です。

# %%
from datasets import Dataset

train_dataset = Dataset.from_list([
    {
        "prompt": "20未満の素数の合計は？",  # 変更 4
        "ground_truth": "77",
    },
])

# %%
def reward_func(completions, ground_truth, **kwargs):
    return [
        float(completion.strip() == answer)
        for completion, answer in zip(completions, ground_truth, strict=True)
    ]


# %%
import tempfile

from trl import GRPOConfig, GRPOTrainer

from companion.lm import checkpoint
from companion.training import train

on_cpu = dict(
    output_dir=tempfile.mkdtemp(),  # 変更 2
    bf16=torch.cuda.is_available(),  # 変更 3
    use_cpu=not torch.cuda.is_available(),
    logging_steps=1,  # 表に出すために、毎回記録します
)

# %%
trainer = GRPOTrainer(
    model=str(checkpoint("prime-sums")),  # 変更 1
    processing_class=tokenizer,
    reward_funcs=reward_func,
    args=GRPOConfig(
        num_generations=4,
        per_device_train_batch_size=4,
        loss_type="dr_grpo",
        importance_sampling_level="token",
        scale_rewards="none",
        beta=0.0,
        epsilon=0.2,
        max_completion_length=512,
        max_steps=6,
        **on_cpu,
    ),
    train_dataset=train_dataset,
)
first_run = train(trainer)
first_run[["step", "loss", "reward", "frac_reward_zero_std", "grad_norm"]]

# %% [markdown]
# 変えたのは 4 か所で、かならず要るのは 3 つ目だけです（ほかに、更新の回数 `max_steps` と、記録を表にするための `logging_steps` を足し、 `trainer.train()` の代わりにパッケージの `train` を使いました）。
#
# 1. **モデルは、フォルダの場所で渡します。** $\beta=0$ なら参照方策は要らないので、メモリの中のモデルでも動きます。けれども、 $\beta$ を変えたくなったときに困らないように、いつもフォルダから渡すことにしましょう。
# 2. **出力先は、一時フォルダにします。**
# 3. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
# 4. **プロンプトは、このモデルが習った文面にします。** サポートページの文面では、この小さなモデルは一つも当てられず、アドバンテージが全部 0 になってしまいます。
#
# `frac_reward_zero_std` は、報酬が全部同じグループ（退化したグループ）の割合です。標準偏差で割らなくても、この値は記録されます。1 の行では、アドバンテージも勾配も 0 です。
# もう一つ、勾配のノルムがとても小さいことにも気づいたでしょうか。次の節の、はじめの項目です。

# %%
learning = first_run["frac_reward_zero_std"] == 0
check("当たりと外れの混じったグループがある", learning.any(),
      f"6 回のうち {learning.sum()} 回")
check("そのときだけ、勾配が 0 でない",
      (first_run["grad_norm"][learning] > 0).all()
      and (first_run["grad_norm"][~learning] == 0).all())
check("それでも、勾配はとても小さい", first_run["grad_norm"].max() < 0.1,
      f"最大 {first_run['grad_norm'].max():.4f}")

# %% [markdown]
# ### 式と TRL の違い
#
# **TRL は、さらに `max_completion_length` で割ります。** 実際の長さとは関係のない、設定で決まる定数です。だから、同じバッチでも、設定を変えれば損失も勾配も変わります。 `max_completion_length=1` とすれば、式 (5.11) のとおりです（ここでは生成をしないので、こんな値も渡せます）。

# %%
def norm_of(result):
    return math.sqrt(sum((x**2).sum().item()
                         for x in result.gradients.values()))


# %%
scaled = {size: by_trl(max_completion_length=size, **off)
          for size in (1, 16, 512)}
for size, result in scaled.items():
    claim(f"L = {size}: L × 損失は、どの L でも同じ",
          size * result.loss, scaled[1].loss, tol=1e-12)
differences = {"損失、L = 1（式）、16、512": "、".join(
    f"{r.loss.item():.6f}" for r in scaled.values())}
differences["勾配のノルム、L = 1、16、512"] = "、".join(
    f"{norm_of(r):.4f}" for r in scaled.values())

# %%
claim("勾配のノルムも 1/L", [norm_of(scaled[n]) * n for n in (16, 512)],
      norm_of(scaled[1]))

# %% [markdown]
# **その違いは、最適化器しだいで、効いたり効かなかったりします。** 同じバッチで 5 回更新し、 $L=16$ を基準に、パラメータの行き先がどれだけ違うかを測ります（ $L=16$ で動いた距離を 1 とします）。
# Adam は、勾配を自分の大きさで割るので、 $L$ は消える、とよく言われます。分母に足す `eps` を 0 に近い値にしたもの、既定値（1e-8）のもの、重み減衰を足したもの、勾配のノルムを 1 で切ったもの（ `max_grad_norm=1.0` 。TRL の既定値です）を比べましょう。

# %%
import copy


def adam(eps=1e-8, decay=0.0):
    return lambda w: torch.optim.AdamW(w, 3e-4, eps=eps, weight_decay=decay)


# %%
OPTIMIZERS = {  # 名前 → (最適化器, 勾配のノルムの上限)
    "SGD": (lambda w: torch.optim.SGD(w, lr=0.01), math.inf),
    "Adam、eps ≈ 0": (adam(eps=1e-20), math.inf),
    "Adam、eps = 1e-8": (adam(), math.inf),
    "＋重み減衰 0.1": (adam(decay=0.1), math.inf),
    "＋ノルムを 1 で切る": (adam(), 1.0),
}

# %%
off_batch = results["方策オフ"].batch


def five_steps(optimizer, limit, size):
    lm = copy.deepcopy(model)
    old_logps = token_log_probs(lm, **off_batch).detach()
    optimizer = optimizer(lm.parameters())
    for _ in range(5):
        loss = dr_grpo_loss(token_log_probs(lm, **off_batch), old_logps, A_8,
                            off_batch["completion_mask"], 0.2, size)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), limit)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(lm.parameters()).detach()


# %%
A_8 = group_advantages(double(right_or_wrong), 4, scale="none")
start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
apart = {}
for name, (optimizer, limit) in OPTIMIZERS.items():
    ends_at = {n: five_steps(optimizer, limit, n) for n in (1, 16, 512)}
    moved = (ends_at[16] - start).norm()
    apart[name] = {f"L = {n}": ((ends_at[n] - ends_at[16]).norm()
                                / moved).item() for n in (1, 512)}
apart = pd.DataFrame(apart).T
apart.round(4)

# %%
plain, decayed, clipped = (apart.iloc[i] for i in (2, 3, 4))
check("SGD: 行き先がまるで違う", apart.loc["SGD"].min() > 0.5)
check("eps ≈ 0 の Adam: L は消える", apart.iloc[1].max() < 1e-6,
      f"最大 {apart.iloc[1].max():.0e}")
check("既定値の eps では、L = 512 の行き先が違う", plain["L = 512"] > 0.1,
      f"{plain['L = 512']:.2f}")
check("重み減衰は、L とは関係しない", (decayed - plain).abs().max() < 0.01)
check("ノルムを切ると、L = 1 の行き先が変わる",
      clipped["L = 1"] > 2 * plain["L = 1"],
      f"{plain['L = 1']:.2f} → {clipped['L = 1']:.2f}")

# %%
differences["既定値の Adam で、L = 16 と 512 の行き先の差"] = (
    f"動いた距離の {plain['L = 512']:.2f} 倍")

# %% [markdown]
# 重み減衰は、AdamW では勾配と別に掛かるので、 $L$ とは関係しません。効くのは 2 つです。一つは **勾配のクリッピング** で、 $L$ が小さいと勾配が大きくなり、切られます。もう一つは Adam の **`eps`** で、 $L$ が大きいと勾配の小さな成分が `eps` に埋もれ、動きにくくなります。
# だから、 `max_completion_length` は「最大生成長」であると同時に、ゆるやかな学習率のつまみでもあります。変えるときは、学習の記録の `grad_norm` も見てください。

# %% [markdown]
# **割るのは、バッチの幅ではありません。** バッチの中でいちばん長い回答の長さ（詰め物をした幅）で割る実装もありそうですが、TRL は違います。だから Dr. GRPO の損失は **加法的** です。2 つのグループを別々に計算して平均しても、一緒に計算しても、同じです。幅で割ると、そうはなりません。

# %%
def width_loss(result):
    """TRL の値を、L ではなく幅で割ったもの。"""
    width = result.batch["completion_mask"].any(0).sum()
    return 16 * result.loss / width


# %%
halves = [by_trl(rows=rows, **off) for rows in (slice(0, 4), slice(4, 8))]
whole = results["方策オフ"]
claim("TRL: 2 つのグループの平均 = 全体の損失",
      sum(half.loss for half in halves) / 2, whole.loss, tol=1e-12)


# %%
in_parts = sum(width_loss(half) for half in halves) / 2
check("幅で割ると、成り立たない",
      abs(in_parts - width_loss(whole)) > 1e-5,
      f"{in_parts:.6f} と {width_loss(whole):.6f}")
differences["幅で割ったら（別々に／一緒に）"] = (
    f"{in_parts:.6f} と {width_loss(whole):.6f}")


# %% [markdown]
# **だから、勾配蓄積も正確です。** TRL は小分けごとの損失を足し、小分けの数で割ります。分母が定数なので、小分けに長短があっても、まとめて計算したのと同じです（DAPO では、バッチ全体のトークン数を数えておく工夫が要ります。5.3.3 節）。学習率を 0 にして、実際の学習で記録される損失と勾配のノルムを比べます。

# %%
from companion.tasks import PRIME_SUMS, problems
from companion.training import preset

dr_preset = preset("dr_grpo")
arithmetic = problems(PRIME_SUMS, dr_preset.examples, seed=0)

# %%
DR_GRPO = dict(
    loss_type="dr_grpo", importance_sampling_level="token",
    scale_rewards="none", beta=0.0, epsilon=0.2,
    max_completion_length=PRIME_SUMS.max_new_tokens,
)

# %%
def trainer_for(**changes):
    return GRPOTrainer(
        model=str(checkpoint("prime-sums", dr_preset.size)),
        reward_funcs=reward_func, processing_class=tokenizer,
        train_dataset=arithmetic,
        args=GRPOConfig(**DR_GRPO, **dr_preset.arguments(**changes)),
    )


# %%
logged = {}
for size, parts in ((32, 1), (16, 2), (8, 4)):
    row = train(trainer_for(
        per_device_train_batch_size=size, gradient_accumulation_steps=parts,
        learning_rate=0.0, max_steps=1)).iloc[0]
    logged[f"{size}×{parts}"] = row["loss"], row["grad_norm"]


# %%
for name, figures in list(logged.items())[1:]:
    claim(f"{name} = 32×1", figures, logged["32×1"], tol=1e-6)
differences["損失、32×1 と 8×4"] = (
    f"{logged['32×1'][0]:.6f} と {logged['8×4'][0]:.6f}")

# %% [markdown]
# **`loss_type` を変えただけでは、標準偏差の割り算は残ります。** `scale_rewards` の既定値は "group" だからです。Dr. GRPO には、2 つのスイッチが要ります。

# %%
one_of_four = [1.0, 0, 0, 0, 1, 0, 0, 0]
both = [by_trl(rewards=one_of_four, scale_rewards=scale).advantages[0].item()
        for scale in ("none", "group")]
check("標準偏差で割ると 2 倍近くになる", abs(both[0] - 0.75) < 1e-6
      and abs(both[1] - 1.4997) < 1e-4, f"{both[0]:.4f} と {both[1]:.4f}")
differences["[1, 0, 0, 0] の Â、none と group"] = (
    f"{both[0]:.4f} と {both[1]:.4f}")

# %% [markdown]
# **方策オンで記録される損失は、 $-\sum_i\widehat A_i|y_i|/(BL)$ です。** 比が 1 なので、残るのは「正解のほうが長いかどうか」だけです。GRPO なら、（ $\beta=0$ で、除かれる回答がなければ）いつも 0 です。どちらの損失からも、学習が進んだかどうかは分かりません。勾配は 0 ではありません。

# %%
on_policy = results["方策オン"]
tokens_of = on_policy.batch["completion_mask"].sum(-1)
claim("方策オンの損失 = −Σ Â|y| / (B L)", on_policy.loss,
      -(A_8 * tokens_of).sum() / (8 * 16))


# %%
grpo_on_policy = by_trl(loss_type="grpo")
claim("GRPO（1/|y|）なら 0", grpo_on_policy.loss, 0.0)
found = f"損失 {on_policy.loss:.4f}、勾配のノルム {norm_of(on_policy):.4f}"
check("損失が負でも正でも、勾配は 0 でない", norm_of(on_policy) > 0.1, found)
differences["方策オン"] = found

# %% [markdown]
# **打ち切られた回答は、既定では損失に入ります。** `mask_truncated_completions=True` にすると、損失の分子からは消えますが、分母 $BL$ にも、グループの平均にも残ります。全部の回答が打ち切られたときの損失は、（0 割りではなく）0 です。

# %%
masked = results["方策オフ、打ち切りを除く"]
claim("アドバンテージは変わらない", masked.advantages, whole.advantages)
found = f"{whole.loss:.6f} → {masked.loss:.6f}"
check("損失は変わる", abs(masked.loss - whole.loss) > 1e-6, found)
differences["打ち切られた回答を除く"] = found

# %%
all_cut = [ids[:1] for ids in completion_ids]  # みな EOS がない
empty = by_trl(completions=all_cut, mask_truncated_completions=True)
claim("全部が打ち切られていれば 0", [empty.loss, norm_of(empty)], 0.0)

# %% [markdown]
# **KL の項を足すなら、それもトークンの和です。** 式 (5.11) に KL の項はありませんが、TRL では `beta` を 0 以外にできます。すると、式 (5.7) の推定量を **足して** $BL$ で割ります。GRPO のように $1/|y_i|$ を掛けないので、KL の項でも、長い回答ほど重みが大きくなります（ `use_bias_correction_kl=False` は、式 (5.7) のままの形を選ぶスイッチです。5.3.1 節）。

# %%
from companion.losses import kl_k3

with_kl = by_trl(beta=0.04, use_bias_correction_kl=False, **off)
logps, ref_logps = (token_log_probs(lm, **with_kl.batch).detach()
                    for lm in (model, old_model))


# %%
k3 = kl_k3(logps, ref_logps) * with_kl.batch["completion_mask"]
claim("Dr. GRPO の損失 + β Σ KL / (B L)", with_kl.loss,
      whole.loss + 0.04 * k3.sum() / (8 * 16), tol=1e-12)
per_answer = (k3.sum(-1) / tokens_of).mean()  # GRPO での平均のしかた
differences["KL の項、Dr. GRPO（× L）と GRPO"] = (
    f"{0.04 * k3.sum() / 8:.6f} と {0.04 * per_answer:.6f}")

# %% [markdown]
# 最後に、既定値を並べます。既定の `loss_type` と `scale_rewards` は、Dr. GRPO のものではありません。

# %%
cpu_only = {k: on_cpu[k] for k in ("output_dir", "use_cpu", "bf16")}
defaults = GRPOConfig(**cpu_only)
for name in ("loss_type", "scale_rewards", "max_completion_length",
             "mask_truncated_completions", "max_grad_norm", "weight_decay"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、TRL の `GRPOTrainer` で学習させます。問題は「 $n$ 未満の素数の合計は？」（ $n=3,\dots,102$ ）です。報酬関数とスイッチはサポートページのまま（ `max_completion_length` だけは、問題に合わせて 8）、大きさ、学習率、 $G$ はパッケージの表（プリセット）から取ります。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。100 問の答えを **丸暗記して** いて、学習とテストの区別はありません。足し算を身につけるのではなく、「知っている」答えを選ぶ確率を上げる学習です。

# %%
from dataclasses import asdict

pd.DataFrame([asdict(dr_preset)])

# %%
trainer = trainer_for()
sampling = ("temperature", "top_p", "top_k", "max_completion_length",
            "num_generations", "mask_truncated_completions")
{name: getattr(trainer.args, name) for name in sampling}

# %%
history = train(trainer)
trained_model = trainer.model

# %%
from companion.plots import curves

curves(history, {
    "報酬の平均": "reward",
    "報酬の標準偏差（バッチ全体）": "reward_std",
    "退化したグループの割合": "frac_reward_zero_std",
    "エントロピー（nat/トークン）": "entropy",
    "回答の長さ（トークン）": "completions/mean_length",
    "打ち切られた回答の割合": "completions/clipped_ratio",
    "勾配のノルム": "grad_norm",
    "損失": "loss",
})

# %% [markdown]
# 報酬が上がり、エントロピーが下がります。正解が増えるにつれて、退化したグループも増えます（多くは、8 つとも正解のグループと考えられます）。損失は 0 のまわりを動くだけで、学習の進み具合を語りません。
# 打ち切りは、ほとんどありません。記録された勾配のノルムは、クリッピング（ `max_grad_norm` ）の 1 よりずっと小さな値です。損失を $L=8$ で割っているからで、式 (5.11) のままなら、勾配はこの 8 倍です。

# %%
first, last = history.iloc[0], history.iloc[-1]
check("報酬が 0.3 以上あがる", last["reward"] - first["reward"] > 0.3,
      f"{first['reward']:.2f} → {last['reward']:.2f}")

# %%
check("エントロピーが下がる", last["entropy"] < 0.7 * first["entropy"],
      f"{first['entropy']:.3f} → {last['entropy']:.3f} nat")
check("退化したグループが増える", last["frac_reward_zero_std"] > 0.3,
      f"{first['frac_reward_zero_std']:.2f} → "
      f"{last['frac_reward_zero_std']:.2f}")
check("打ち切りはほとんどない",
      history["completions/clipped_ratio"].max() < 0.02)
largest = history["grad_norm"].max()
check("勾配のノルムは、切られる 1 より小さい", largest < 0.5,
      f"最大 {largest:.3f}")

# %% [markdown]
# 正解率を測ります。「貪欲法」は、いちばん確率の高い文字を選びつづけたとき、「サンプリング」は、温度 1 で引いたときです。

# %%
from companion.lm import generate, measure
from companion.plots import before_after

# %%
sft_model, _ = load("prime-sums", dr_preset.size)
prompts = PRIME_SUMS.test_prompts
before, after = (measure(lm, tokenizer, PRIME_SUMS, prompts)
                 for lm in (sft_model, trained_model))
titles = {"sampled": "サンプリング", "greedy": "貪欲法"}
before_after(
    {title: (before[key], after[key]) for key, title in titles.items()},
    limits=(0, 1), title="正解率",
)

# %%
check("サンプリングの正解率が 0.35 以上あがる",
      after["sampled"] - before["sampled"] > 0.35,
      f"{before['sampled']:.3f} → {after['sampled']:.3f}")
check("貪欲法の正解率は 0.9 以上", after["greedy"] > 0.9,
      f"{before['greedy']:.2f} → {after['greedy']:.2f}")

# %%
eight = prompts[10:90:10]
samples = pd.DataFrame({"プロンプト": eight})
for name, lm in (("学習前", sft_model), ("学習後", trained_model)):
    ys = generate(lm, tokenizer, eight, max_new_tokens=8, temperature=1.0)
    samples[name] = [f"{y} {'○' if y == PRIME_SUMS.answer(x) else '×'}"
                     for x, y in zip(eight, ys, strict=True)]
samples

# %% [markdown]
# ## 実験
#
# ステップ 8 の言語に戻ります。回答は、一つの文字を繰り返すだけ。文体 a は確率 0.7、b は確率 0.3 で報酬 1、長さは報酬に関係しません。
# 報酬の期待値を上げるには、b をやめて a を選べばよく、長さを変える理由はありません。それでも長さが動くなら、それは学習のしかたのせいです。
#
# ### 実験 1：悪い文体の長さ
#
# GRPO、Dr. GRPO、DAPO で、8 つの乱数の種（シード）を学習させます。損失は、TRL と一致すると確かめた関数です（GRPO と DAPO は、5.3.1 節と 5.3.3 節のノートブックで）。DAPO は損失だけを使い、動的サンプリングなどは入れません。1 回に $B=128$ 個の回答（ $G=32$ が 4 グループ）を引き、300 回更新します。最適化器は、TRL と同じ Adam（学習率は直線で 0 まで下げます）です。
# 長さの期待値は、サンプリングではなく、方策の確率から **正確に** 計算します。
#
# シードどうしはパラメータを共有しないので、シードごとの損失を足して、まとめて微分します。GRPO と Dr. GRPO の損失は行の平均なので、シードの数を掛ければ足したことになります。DAPO の分母はシードごとのトークン数なので、アドバンテージをそれで割っておき、 `num_tokens=1` とします。

# %%
GROUP = 32


def sum_of_losses(method, logps, rewards, mask):
    """全シードの損失の和。logps と mask は (S, n, L)、rewards は (S, n)。"""
    seeds, n = rewards.shape
    scale = "none" if method == "Dr. GRPO" else "group"
    A = group_advantages(rewards.flatten(), GROUP, scale)
    rows = logps.flatten(0, 1), logps.detach().flatten(0, 1)
    flat_mask = mask.flatten(0, 1)
    if method == "GRPO":
        return seeds * grpo_loss(*rows, A, flat_mask, 0.2)
    if method == "Dr. GRPO":
        return seeds * dr_grpo_loss(*rows, A, flat_mask, 0.2, L)
    tokens = mask.sum((1, 2)).repeat_interleave(n)
    return dapo_loss(*rows, A / tokens, flat_mask, 0.2, 0.28, num_tokens=1)


# %%
both_masks = style_mask.repeat(2, 1)  # 2L 通りの回答のマスク


def train_styles(method, seeds=8, n=128, steps=300, lr=0.02,
                 optimizer=torch.optim.Adam, seed=0):
    """シードごとの、文体 a、b の長さの期待値 (更新回数 + 1, S, 2)。"""
    g = torch.Generator().manual_seed(seed)
    begin, stop = (v.repeat(seeds, 1).requires_grad_()
                   for v in (even_begin, start_stop))
    stepper = optimizer([begin, stop], lr=lr)
    decay = torch.optim.lr_scheduler.LinearLR(stepper, 1.0, 0.0, steps)
    trace = []
    for _ in range(steps + 1):
        table = style_tokens(begin, stop)  # (S, 文体, L, L)
        trace.append(expected_lengths(table.detach().sum(-1)))
        chance = table.detach().sum(-1).flatten(1).exp()
        y = torch.multinomial(chance, n, replacement=True, generator=g)
        coins = torch.rand(y.shape, generator=g, dtype=torch.float64)
        logps = table.flatten(1, 2)[torch.arange(seeds)[:, None], y]
        loss = sum_of_losses(method, logps, (coins < PAYS[y // L]).double(),
                             both_masks[y])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        decay.step()
    return torch.stack(trace)


# %%
METHODS = ("GRPO", "Dr. GRPO", "DAPO")
lengths_of = {method: train_styles(method) for method in METHODS}

# %% [markdown]
# 比べるために、 **サンプリングの雑音がないとき** の道筋も計算します。ステップ 8 の `flow` （勾配の期待値）を、同じ Adam に渡すのです。GRPO のアドバンテージの期待値 $a_s$ は、自分以外の $G-1$ 個のうち正解の数が $\mathrm{Bin}(G-1,p)$ に従うことから計算します。まず、その計算を、 $G=8$ の正誤の $2^8$ 通りの数え上げと比べておきます。

# %%
def mean_advantages(G, p):
    """GRPO のアドバンテージの期待値。自分が間違いのとき、正解のとき (2,)。"""
    m = torch.arange(G, dtype=torch.float64)  # ほかの正解の数
    ways = double([math.comb(G - 1, int(i)) for i in m])
    chance = ways * p**m * (1 - p) ** (G - 1 - m)
    values = []
    for mine in (0, 1):
        k = m + mine
        std = (k * (G - k) / (G * (G - 1))).sqrt()
        values.append((chance * (mine - k / G) / (std + 1e-4)).sum())
    return torch.stack(values)


# %%
patterns = torch.cartesian_prod(*[double([0, 1])] * 8)
p = 0.35
pattern_chance = (p**patterns * (1 - p) ** (1 - patterns)).prod(-1)
own = group_advantages(patterns.flatten(), 8).view(-1, 8)[:, 0]

# %%
for mine in (0, 1):
    at = patterns[:, 0] == mine
    claim(f"E[Â | 自分の報酬が {mine}]", mean_advantages(8, p)[mine],
          (pattern_chance * own)[at].sum() / pattern_chance[at].sum())


# %%
def noiseless(method, steps=300, lr=0.02):
    """勾配の期待値だけで学習したときの、長さの期待値 (更新回数 + 1, 2)。"""
    begin, stop = (v.clone().requires_grad_()
                   for v in (even_begin, start_stop))
    adam = torch.optim.Adam([begin, stop], lr=lr)
    decay = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)
    trace = []
    for _ in range(steps + 1):
        trace.append(expected_lengths(style_tokens(begin, stop).sum(-1)))
        p = begin.detach().softmax(-1) @ PAYS
        wrong, right = mean_advantages(GROUP, p)
        a, loss = (1 - PAYS) * wrong + PAYS * right, EQUATION["長さで割る"]
        if method == "Dr. GRPO":
            a, loss = (1 - 1 / GROUP) * (PAYS - p), EQUATION["和"]
        for leaf, ascent in zip((begin, stop), flow(begin, stop, a, loss),
                                strict=True):
            leaf.grad = -ascent
        adam.step()
        decay.step()
    return torch.stack(trace).detach()


# %%
still = {method: noiseless(method) for method in METHODS[:2]}

# %%
from companion.plots import spread

TINTS = dict(zip(METHODS, (COLOURS[1], COLOURS[0], COLOURS[2]), strict=True))
drawn, (axes,) = figure(1, 2, panel=(4.6, 3.4))
for ax, style, title in ((axes[0], 1, "悪い文体 b は、GRPO でだけ伸びる"),
                         (axes[1], 0, "良い文体 a は、GRPO でだけ縮む")):
    for method in METHODS:
        spread(range(301), lengths_of[method][:, :, style].T, label=method,
               ax=ax, colour=TINTS[method], xlabel="更新回数",
               ylabel="長さの期待値（トークン）", title=title)
    for method, line in still.items():
        ax.plot(line[:, style], "--", color=TINTS[method], linewidth=1.2,
                label="_雑音なし")
drawn

# %% [markdown]
# 線は 8 シードの中央値、帯は最小値から最大値まで、破線は雑音のないときです。
# GRPO では、悪い文体が 5 トークンから 10 トークン以上に長くなり、良い文体は 3 トークンほどに縮みます。Dr. GRPO と DAPO の長さは、5 のまわりにとどまります。
# 雑音のない道筋で、Dr. GRPO の長さはまったく動きません（Adam は 0 に近い丸め誤差を拡大するので、ここだけ許容差を 1e-6 にしています）。

# %%
ends_at = {method: lines[-1] for method, lines in lengths_of.items()}
for method, (low, high) in {"GRPO": (10, 16), "Dr. GRPO": (3.3, 6.6),
                            "DAPO": (3.3, 6.6)}.items():
    found = ends_at[method][:, 1]
    check(f"悪い文体、{method}: 8 シードすべてで {low}〜{high} トークン",
          low < found.min() and found.max() < high,
          f"{found.min():.1f}〜{found.max():.1f}")

# %%
others = torch.cat([ends_at["Dr. GRPO"], ends_at["DAPO"]])
check("GRPO の最小は、ほかの 2 つの最大の 1.5 倍以上",
      ends_at["GRPO"][:, 1].min() > 1.5 * others[:, 1].max())
check("良い文体は、GRPO でだけ縮む",
      ends_at["GRPO"][:, 0].max() < 3.5 < others[:, 0].min(),
      f"GRPO {ends_at['GRPO'][:, 0].min():.1f}〜"
      f"{ends_at['GRPO'][:, 0].max():.1f}、"
      f"ほかは {others[:, 0].min():.1f} 以上")

# %%
claim("雑音がなければ、Dr. GRPO の長さは動かない",
      still["Dr. GRPO"], still["Dr. GRPO"][0], tol=1e-6)
check("雑音がなくても、GRPO の悪い文体は長くなる",
      still["GRPO"][-1, 1] > 10, f"{still['GRPO'][-1, 1]:.1f} トークン")

# %% [markdown]
# DAPO も $1/|y_i|$ を掛けません（全トークンの平均です）。標準偏差では割りますが、報酬は 0/1 で、プロンプトは一つなので、向きは変わらないのでした（ステップ 6）。
#
# Dr. GRPO の **中央値は 5 のまわりですが、帯には幅があります**。この「ただよい」は何でしょうか。

# %% [markdown]
# ### 実験 2：ただよいの正体は雑音で、Adam はそれを小さくしてくれない
#
# 雑音がなければ動かないのですから、ただよいはサンプリングの雑音です。ならば、バッチを大きくすれば小さくなるはずです。64 シードで、バッチを 32 から 128 に増やしてみます。最適化器は、Adam と SGD の 2 つです（SGD の学習率が大きいのは、 $L=24$ で割った損失だからです。式 (5.11) でなら 0.5 です）。

# %%
settings = {"SGD": dict(optimizer=torch.optim.SGD, lr=12.0),
            "Adam": dict(optimizer=torch.optim.Adam, lr=0.05)}

# %%
drift = {
    (name, n): train_styles(
        "Dr. GRPO", seeds=64, n=n, steps=60, **how)[-1, :, 1]
    for name, how in settings.items() for n in (32, 128)
}
pd.DataFrame({f"{name}、B = {n}": {
    "中央値": last.quantile(0.5).item(), "標準偏差": last.std().item(),
    "最小": last.min().item(), "最大": last.max().item(),
} for (name, n), last in drift.items()}).T.round(2)

# %%
narrowed = {name: (drift[name, 128].std() / drift[name, 32].std()).item()
            for name in settings}
check("SGD: バッチを 4 倍にすると、ばらつきは半分ほど",
      0.35 < narrowed["SGD"] < 0.65, f"{narrowed['SGD']:.2f} 倍")
check("Adam: 4 倍にしても、ばらつきは小さくならない",
      narrowed["Adam"] > 0.8, f"{narrowed['Adam']:.2f} 倍")


# %%
for (name, n), last in drift.items():
    middle = last.quantile(0.5)
    check(f"{name}、B = {n}: 中央値は 5 のまわり", abs(middle - 5) < 0.4,
          f"{middle:.2f}")

# %% [markdown]
# どの場合も、中央値はもとの長さから離れていません。Dr. GRPO は、長さをどちらの向きにも押していないのです。
# SGD では、雑音が $1/\sqrt B$ で小さくなり、ただよいも小さくなります。Adam は、勾配を成分ごとに自分の大きさで割ります。長さのロジットの勾配は **雑音だけ** なので、（分母の `eps` に埋もれないかぎり）雑音をどれだけ小さくしても、割ってしまえば同じ大きさの歩幅になります。信号のない方向では、Adam はバッチを増やしても静かになりません。

# %% [markdown]
# ### 実験 3：言語モデルと TRL
#
# 同じことを、言語モデルと TRL の `GRPOTrainer` で行います。プロンプトは `>` だけです。まず、上の表形式の方策から引いた手本で、言語モデルを SFT します（ `warm_up` ）。

# %%
from companion.lm import completion_batch, new_model
from companion.lm.warmup import warm_up

CUT = 20  # 打ち切りの長さ
rng = np.random.default_rng(0)
demonstrations = Dataset.from_list([
    {"prompt": ">", "completion": "ab"[rng.integers(2)] * k}
    for k in rng.geometric(0.25, size=60 * 64).clip(max=CUT).tolist()
])

# %%
student = new_model(seed=0)
warm_up(student, tokenizer, demonstrations, progress=False)
student_folder = tempfile.mkdtemp()
student.save_pretrained(student_folder)

# %% [markdown]
# 長さの期待値は、表のときと同じ形の、2 × 20 通りの回答の確率から、正確に計算します。言語モデルは「ab」のような、この言語の外の文字列も書けるので、その確率（漏れ）も測ります。

# %%
texts = [style * k for style in "ab" for k in range(1, CUT + 1)]
every = completion_batch(tokenizer, [">"] * 2 * CUT, texts)
every = {name: ids[:, :1 + CUT] for name, ids in every.items()}

# %%
every_length = every["completion_mask"].sum(-1).view(2, CUT)


def style_report(lm):
    """文体 a、b の長さの期待値と確率、漏れ。"""
    with torch.no_grad():
        logps = token_log_probs(lm, **every).sum(-1).double().view(2, CUT)
    mass = logps.exp().sum(-1)
    lengths = (logps.softmax(-1) * every_length).sum(-1)
    return [*lengths.tolist(), *mass.tolist(), 1 - mass.sum().item()]


# %%
COLUMNS = ["a の長さ", "b の長さ", "a の確率", "b の確率", "漏れ"]
before_rl = dict(zip(COLUMNS, style_report(student), strict=True))
pd.DataFrame([before_rl]).round(3)

# %%
check("長さの期待値は 5 のまわり",
      all(4.5 < before_rl[name] < 5.5 for name in COLUMNS[:2]))
check("漏れは 0.1 未満", before_rl["漏れ"] < 0.1, f"{before_rl['漏れ']:.3f}")

# %% [markdown]
# 報酬は、最初の文字だけで決めます。a なら確率 0.7、b なら確率 0.3 で 1 です。

# %%
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """5 回の更新ごとに、長さの期待値などを記録する。"""

    def __init__(self):
        self.records = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step % 5 == 0:
            self.records.append([state.global_step, *style_report(model)])


# %%
STEPS, RATE = 40, 3e-4
SWITCHES_OF = {
    "GRPO": dict(loss_type="grpo", scale_rewards="group"),
    "Dr. GRPO": dict(loss_type="dr_grpo", scale_rewards="none"),
    "DAPO": dict(loss_type="dapo", scale_rewards="group", epsilon_high=0.28),
}


# %%
def trl_styles(method):
    coins = np.random.default_rng(0)

    def reward(completions, **kwargs):
        pays = [dict(a=0.7, b=0.3).get(y[:1], 0) for y in completions]
        return [float(coins.random() < chance) for chance in pays]

    watch = Watch()
    trainer = GRPOTrainer(
        student_folder, reward, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": ">"}] * 64),
        args=GRPOConfig(
            **SWITCHES_OF[method], beta=0.0, epsilon=0.2,
            max_completion_length=CUT, **dr_preset.arguments(
                per_device_train_batch_size=64, num_generations=32,
                learning_rate=RATE, max_steps=STEPS)),
        callbacks=[watch],
    )
    train(trainer)
    rows = [*watch.records, [STEPS, *style_report(trainer.model)]]
    return pd.DataFrame(rows, columns=["step", *COLUMNS])


# %%
in_trl = {method: trl_styles(method) for method in METHODS}

# %% [markdown]
# ここでも、 **雑音のない道筋** を比べます。 $J$ は最初の文字の確率だけで決まるので、 $\nabla J$ は正確に計算できます。これを、TRL と同じ最適化器（AdamW、学習率は直線で 0 まで）に渡します。

# %%
start_ids = tokenizer(">", return_tensors="pt")["input_ids"]
a_id, b_id = tokenizer("ab")["input_ids"]


def expected_reward(lm):
    """J。報酬は、最初の文字だけで決まる。"""
    chance = lm(input_ids=start_ids).logits[0, -1].softmax(-1)
    return 0.7 * chance[a_id] + 0.3 * chance[b_id]


# %%
lm = copy.deepcopy(student).train()
adam = torch.optim.AdamW(lm.parameters(), lr=RATE, weight_decay=0.0)
decay = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, STEPS)

# %%
exact = [[0, *style_report(lm)]]
for step in range(1, STEPS + 1):
    adam.zero_grad()
    (-expected_reward(lm)).backward()
    adam.step()
    decay.step()
    if step % 5 == 0:
        exact.append([step, *style_report(lm)])
exact = pd.DataFrame(exact, columns=["step", *COLUMNS])

# %%
drawn, (axes,) = figure(1, 3, panel=(3.6, 3.2))
titles = {"b の長さ": "悪い文体 b の長さ", "a の長さ": "良い文体 a の長さ",
          "b の確率": "悪い文体 b の確率"}
for ax, (name, title) in zip(axes, titles.items(), strict=True):
    for method, rows in in_trl.items():
        ax.plot(rows["step"], rows[name], "o-", markersize=3.5,
                color=TINTS[method], label=method)
    ax.plot(exact["step"], exact[name], "--", color=GREY, label="∇J そのもの")
    ax.set(title=title, xlabel="更新回数",
           ylabel="確率" if "確率" in name else "長さの期待値（トークン）")
axes[2].legend(loc="upper right")
drawn

# %%
end_b = {method: rows["b の長さ"].iloc[-1] for method, rows in in_trl.items()}
check("TRL でも、GRPO では悪い文体が長くなる", end_b["GRPO"] > 6.5,
      f"{end_b['GRPO']:.1f} トークン")
for method in METHODS[1:]:
    check(f"{method} では長くならない（GRPO の 3 分の 2 未満）",
          end_b[method] < 5.5 and end_b[method] < end_b["GRPO"] / 1.5,
          f"{end_b[method]:.1f} トークン")
check("どの手法でも、悪い文体の確率は 0 に近づく",
      max(rows["b の確率"].iloc[-1] for rows in in_trl.values()) < 0.05)
longest_a = max(in_trl[method]["a の長さ"].iloc[-1] for method in METHODS)
check("良い文体は、どの手法でも破線より短い",
      longest_a < exact["a の長さ"].iloc[-1] - 1,
      f"{longest_a:.1f} 以下、破線は {exact['a の長さ'].iloc[-1]:.1f}")

# %% [markdown]
# 表形式のときと同じく、GRPO の悪い文体だけが長くなりました。1 回ずつの結果なので、種を変えたときのばらつきは、演習 4 で見てください。
# 破線は向きの目安で、学習がそのとおりに進むわけではありません。良い文体は、Dr. GRPO と DAPO でも、破線ほど長くなりませんでした。実験 1 の GRPO でも、実線は破線の手前でした。雑音があると、Adam の歩みが小さくなるためと考えられます（ここでは確かめていません）。
#
# その破線に、目を引くことがあります。表形式では動かなかった Dr. GRPO の「雑音のない道筋」が、ここでは動いています。 **$\nabla J$ そのものが、悪い文体を短く、良い文体を長くする** のです。言語モデルでは、最初の文字を選ぶパラメータと、繰り返すかやめるかを決めるパラメータが共有されています。
# 学習を始めるときに $\nabla J$ の向きに動くと、それぞれの長さの期待値 $\ell_s$ はどう変わるでしょうか。変化率 $\langle\nabla\ell_s,\nabla J\rangle$ を、表形式と言語モデルで計算します。

# %%
def rates(lengths, J, leaves):
    """∇J の向きに動いたときの、長さの期待値の変化率 (文体,)。"""
    ascent, *slopes = (
        torch.autograd.grad(f, leaves, retain_graph=True,
                            materialize_grads=True) for f in (J, *lengths))
    return [sum((u * v).sum() for u, v in zip(s, ascent, strict=True)).item()
            for s in slopes]


# %%
table = [v.clone().requires_grad_() for v in (even_begin, start_stop)]
table_rates = rates(expected_lengths(style_tokens(*table).sum(-1)),
                    table[0].softmax(-1) @ PAYS, table)

# %%
lm = copy.deepcopy(student)
logps = token_log_probs(lm, **every).sum(-1).view(2, CUT)
lm_rates = rates((logps.softmax(-1) * every_length).sum(-1),
                 expected_reward(lm), list(lm.parameters()))


# %%
claim("表形式: ∇J は長さを動かさない", table_rates, [0, 0], tol=1e-12)
check("言語モデル: 良い文体は長く、悪い文体は短くなる向き",
      lm_rates[0] > 0.05 > -0.05 > lm_rates[1],
      f"a {lm_rates[0]:+.2f}、b {lm_rates[1]:+.2f}")
last = exact.iloc[-1]
check("その道筋の終わり", last["b の長さ"] < 4.5 and last["a の長さ"] > 6,
      f"b {last['b の長さ']:.1f}、a {last['a の長さ']:.1f} トークン")

# %% [markdown]
# これは、長さのバイアスではありません。 $J$ を上げるいちばん急な向きに、たまたま長さの変化が含まれていた、ということです。「a を書きやすく、b を書きにくく」という変化が、2 文字目以降の a と b にも及んだと考えられます。
# 「Dr. GRPO なら長さは変わらない」のではなく、 **「Dr. GRPO の勾配の期待値は、報酬の期待値の勾配と同じ向きを向いている」** のです。長さが変わるかどうかは、モデルと報酬が決めます。
#
# 長い思考が本当に報酬を上げるなら、 $\nabla J$ は回答を長くする向きを含むはずです。学習で回答が長くなったとき、どこまでがそのためで、どこからが割り算のせいなのかは、全体の長さの曲線だけでは分かりません。この実験のように、 **良い回答と悪い回答の長さを、分けて** 描いてください。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/5.3.2-dr-grpo.ipynb](exercises/5.3.2-dr-grpo.ipynb) で、式 (5.10)・(5.11) を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **別の割り算** 標準偏差の代わりに、グループの報酬の最大値と最小値の差で割ると（差が 0 なら、アドバンテージは 0 のままにします）、ステップ 6 の「0/1、1 問」と「3 種類、1 問」の角度はどうなるでしょうか。先に言い当ててから、 `weighted_groups` を書き換えて確かめてください。
# 3. **片方だけ** 実験 1 に、標準偏差では割らずに $1/|y|$ だけを掛ける手法（ `grpo_loss` に `scale="none"` のアドバンテージ）を足すと、悪い文体の長さはどうなるでしょうか。反対に、標準偏差だけで割ると、どうでしょうか。
# 4. **種を変える** 実験 3 の `dr_preset.arguments(seed=…)` と `reward` の乱数の種を変えて、3 回ずつ走らせてください。GRPO と Dr. GRPO の悪い文体の長さは、重なるでしょうか。同じ種どうしで比べると、どうでしょうか。
# 5. **長さが効く報酬** ステップ 8 の報酬を「文体 b で、しかも 8 トークン以上なら 1」に変えると、Dr. GRPO は長さを変えるでしょうか。 `flow` に渡すアドバンテージを、文体ごとから回答ごとに変えて、 $h_b$ のロジットの勾配の符号を調べてください。

# %% [markdown]
# ## 参考文献
#
# - Liu, Chen, Li, Qi, Pang, Du, Lee, Lin. Understanding R1-Zero-Like Training: A Critical Perspective. 2025. [arXiv:2503.20783](https://arxiv.org/abs/2503.20783) Dr. GRPO の論文です。2 つのバイアスの指摘と、ステップ 4 の RLOO との関係も、この論文にあります。
# - Shao ほか. DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. 2024. [arXiv:2402.03300](https://arxiv.org/abs/2402.03300) GRPO の論文です。5.3.1 節で扱います。
# - Kool, van Hoof, Welling. Buy 4 REINFORCE Samples, Get a Baseline for Free! ICLR 2019 Workshop. RLOO のベースラインです。
# - Ahmadian ほか. Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs. 2024. [arXiv:2402.14740](https://arxiv.org/abs/2402.14740) 言語モデルでの RLOO です。
# - Yu ほか. DAPO: An Open-Source LLM Reinforcement Learning System at Scale. 2025. [arXiv:2503.14476](https://arxiv.org/abs/2503.14476) 比べた相手の DAPO。5.3.3 節で扱います。
# - TRL 1.12.0 `GRPOTrainer`（`trl/trainer/grpo_trainer.py`）。
