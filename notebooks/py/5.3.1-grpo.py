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
# # 5.3.1 GRPO：グループの平均を物差しにする
#
# 本書 5.3.1 節の式 (5.1) と (5.4)〜(5.7) を扱います。
#
# GRPO（group relative policy optimization）は、一つのプロンプトに $G$ 個の回答を書かせ、グループの平均より良かった回答の確率を上げ、悪かった回答の確率を下げます。価値モデル（クリティック）は要りません。
# このノートブックでは、REINFORCE から出発して式 (5.4) の因子を一つずつ加え、それぞれが何をするのかを小さな世界で実行して確かめます。それから TRL の `GRPOTrainer` と値・勾配が一致することを確かめ、サポートページの例題（素数の和）で小さな言語モデルを学習させます。
# 途中で、三つの問いに数で答えます。記録される損失が 0 なのに学習が進むのはなぜか。 $\epsilon$ を変えても何も変わらないことがあるのはなぜか。そして、式 (5.7) の KL は方策をどこへ連れて行くのか、です。
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
# | $x,\ y_i$ （プロンプト、 $i$ 番目の回答） | `prompt`, `completion` | – | 同じ |
# | $G$ （グループの大きさ） | `group_size`, `G` | – | `num_generations` |
# | $r_i$ （回答の報酬） | `rewards` | (B,) | `reward` |
# | $\widehat A_{i,t}$ （アドバンテージ。回答に一つで、どの $t$ でも同じ） | `advantages` | (B,) | `advantages` |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}},\ \log\pi_{\mathrm{ref}}$ （トークンの対数確率） | `logps`, `old_logps`, `ref_logps` | (B, T) | `per_token_logps`, `old_per_token_logps`, `ref_per_token_logps` |
# | $w_{i,t}(\theta)$ （重要度比） | `ratio` | (B, T) | `coef_1` |
# | $\epsilon$ （クリッピングの幅） | `epsilon` | – | `epsilon` |
# | $\widehat D_{\mathrm{KL}}^{i,t}$ （KL の推定量） | `kl` | (B, T) | `per_token_kl` |
# | $\beta$ | `beta` | – | `beta` |
# | $\lvert y_i\rvert$ （回答の長さ。EOS を含む） | `mask.sum(-1)` | (B,) | `completion_mask.sum(-1)` |
#
# B は回答の総数（プロンプトの数 × $G$ ）で、同じグループの行は続けて並べます。T はいちばん長い回答の長さです。 `mask` は回答のトークンで 1、詰め物で 0 です。対数確率の単位は nat です。

# %% [markdown]
# ## 導出
#
# これから組み立てるのは、次の目的関数です。
#
# $$
# J_{\mathrm{GRPO}}(\theta)=\mathbb{E}\left[\frac1G\sum_{i=1}^{G}\frac1{|y_i|}\sum_{t=1}^{|y_i|}\Bigl(\widehat W_{i,t}(\theta)-\beta\widehat D_{\mathrm{KL}}^{i,t}[\pi_\theta\|\pi_{\mathrm{ref}}]\Bigr)\right]
# \tag{5.4}
# $$
#
# ここで $\widehat W_{i,t}=\min\{w_{i,t}\widehat A_{i,t},\ \mathrm{clip}(w_{i,t},1-\epsilon,1+\epsilon)\widehat A_{i,t}\}$ です。因子は六つあります。
#
# | 因子 | 何をするか | 扱うところ |
# |---|---|---|
# | $\widehat A$ の分子 $r_i-\bar r$ | 報酬の水準を消す（全部の報酬に同じ数を足しても、何も変わらない）。勾配の期待値は $1-1/G$ 倍になる | ステップ 1 |
# | $\widehat A$ の分母（標準偏差） | プロンプトの重みを、正解率によって変える | ステップ 2 |
# | $1/\lvert y_i\rvert$ | 長い回答のトークンほど、重みを小さくする | ステップ 3 |
# | $w_{i,t}$ | 生成したあとで動いた方策のために、補正する | ステップ 4 |
# | $\min$ と $\mathrm{clip}$ | 一度に動きすぎないよう、勾配を止める | ステップ 4 |
# | $\beta\widehat D_{\mathrm{KL}}$ | 参照方策につなぎ留める | ステップ 5・6 |
#
# ### 全部を数え上げられる世界
#
# 文字と長さを小さく限れば、すべての回答を、さらには **すべてのグループ** を数え上げて、期待値を有限の和として計算できます。方策は、プロンプトと接頭辞（それまでに書いた文字列）ごとに次のトークンのロジットを並べた表です（表形式の方策）。
# プロンプトは 1 つにします。表形式の方策では、プロンプトどうしはパラメータを共有しないので、これで足ります。

# %%
from companion.exact import World, expect, kl, tilt

world = World(prompts=1, letters=2, max_length=3)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# `$` は EOS です。長さの上限で打ち切られた回答には、EOS がありません。報酬と方策 $\pi_\theta$ は乱数で決めます。

# %%
g = torch.Generator().manual_seed(0)
theta = world.random_logits(g)  # (1, 接頭辞, トークン)
rewards = world.random_rewards(g)[0]  # (Y,)
logps = world.log_probs(theta)[0]  # 系列の対数確率 (Y,)
claim("Σ_y π(y|x) = 1", logps.exp().sum(), 1.0)


# %% [markdown]
# グループを全部数え上げる関数と、それを使って「損失の勾配の期待値」を計算する関数を作ります。 `loss_of` には、回答の番号 `rows` 、トークンの対数確率、マスクが渡されます。アドバンテージはデータなので、勾配は対数確率だけに流れます。

# %%
def all_groups(logps, G):
    """あらゆるグループの回答の番号 (N, G) と、それが出る確率 (N,)。"""
    possible = torch.arange(len(logps))[logps > -torch.inf]
    groups = torch.cartesian_prod(*[possible] * G)
    return groups, logps[groups].sum(-1).exp()


def expected_gradient(world, theta, G, loss_of):
    """方策 theta からグループを引いたときの、∇loss の期待値。"""
    theta = theta.detach().requires_grad_()
    table = world.token_log_probs(theta)[0]  # (Y, T)
    groups, chance = all_groups(table.detach().sum(-1), G)
    rows = groups.flatten()
    leaf = table.detach()[rows].requires_grad_()
    loss = loss_of(rows, leaf, world.mask[rows])  # N 個のグループの平均
    (slope,) = torch.autograd.grad(len(groups) * loss, leaf)
    slope = slope * chance.repeat_interleave(G)[:, None]  # × 出る確率
    at = torch.zeros_like(table).index_add(0, rows, slope)
    (gradient,) = torch.autograd.grad(table, theta, grad_outputs=at)
    return gradient


# %%
def double(values):
    return torch.tensor(values, dtype=torch.float64)


groups, chance = all_groups(logps, 3)
claim(f"{len(groups)} 通りのグループの確率の和は 1", chance.sum(), 1.0)

# %% [markdown]
# ### ステップ 1：REINFORCE から、グループの平均へ
#
# 最大にしたいのは、報酬の期待値 $J(\theta)=\mathbb{E}_{y\sim\pi_\theta(\cdot\mid x)}[r(x,y)]$ です。 $\nabla\pi_\theta=\pi_\theta\nabla\log\pi_\theta$ なので、勾配は $\nabla J=\mathbb{E}[r\,\nabla\log\pi_\theta(y\mid x)]$ です。この期待値を、引いた回答の平均で見積もるのが REINFORCE です。
# 確率の和は変わらないので $\mathbb{E}[\nabla\log\pi_\theta]=0$ で、回答によらない数 $b$ （ベースライン）を報酬から引いても、期待値は変わりません。

# %%
def gradient_of(scalar, theta):
    return torch.autograd.grad(scalar, theta, retain_graph=True)[0]

# %%
theta = theta.detach().requires_grad_()
logps = world.log_probs(theta)[0]
grad_J = gradient_of((logps.exp() * rewards).sum(), theta)
frozen = logps.detach().exp()
for b in (0.0, 5.0):
    reinforce = gradient_of((frozen * (rewards - b) * logps).sum(), theta)
    claim(f"∇J = E[(r − {b:g})∇log π]", grad_J, reinforce)

# %% [markdown]
# よく使われるベースラインは、報酬の平均です。GRPO は、それを同じプロンプトへの $G$ 個の回答の平均 $\bar r=\frac1G\sum_jr_j$ で見積もります。ただし、この平均には **自分の報酬 $r_i$ も入っている** ので、「回答によらない数」ではありません。
#
# **主張** いまの方策から互いに独立に引いた $G$ 個の回答で、系列の対数確率（トークンの和）を使うなら、
#
# $$
# \mathbb{E}\left[\frac1G\sum_{i=1}^{G}(r_i-\bar r)\nabla\log\pi_\theta(y_i\mid x)\right]=\Bigl(1-\frac1G\Bigr)\nabla J
# $$
#
# です。 $\bar r$ のうち、ほかの回答の分は期待値で消え、自分の分 $r_i/G$ だけが残るからです。向きは正しく、大きさが $1-1/G$ 倍になります。

# %%
from companion.losses import group_advantages


def with_group_mean(rows, logps, mask):
    advantages = group_advantages(rewards[rows], G, scale="none")
    return -(advantages * (logps * mask).sum(-1)).mean()


for G in (2, 3):
    gradient = expected_gradient(world, theta, G, with_group_mean)
    claim(f"G = {G}: (1 − 1/G)∇J", -gradient, (1 - 1 / G) * grad_J)

# %% [markdown]
# 自分を除いた平均を使う RLOO（REINFORCE leave-one-out）なら、ちょうど $\nabla J$ になります。といっても、この二つは一つ一つのグループで定数倍しか違いません。
#
# $$
# r_i-\frac1{G-1}\sum_{j\ne i}r_j=\frac{G}{G-1}\,(r_i-\bar r)
# $$

# %%
r_group = torch.randn(5, 4, generator=g, dtype=torch.float64)  # 5 グループ
others = (r_group.sum(-1, keepdim=True) - r_group) / 3
group_mean = group_advantages(r_group.flatten(), 4, scale="none")
claim("RLOO = G/(G−1) × (r − 平均)",
      (r_group - others).flatten(), 4 / 3 * group_mean)

# %% [markdown]
# ベースラインで、勾配の分散はどう変わるでしょうか。三つの不偏な見積もり（何も引かない REINFORCE、本当の平均 $\mathbb{E}[r]$ を引くもの、RLOO）の分散を、全部のグループを数え上げて計算します。報酬に定数を足しても最適な方策は変わらないので、足したときの分散も並べます。
# ここからは、回答が 1 トークンの小さな世界も使います。1 トークンなら、 $\nabla\log\pi_\theta(y)$ は、 $y$ のところだけ 1 を足した $-\pi_\theta$ です。

# %%
letter_world = World(prompts=1, letters=3, max_length=1)
ref_letters = letter_world.random_logits(g)
r_letters = letter_world.random_rewards(g)[0]
print("1 トークンの回答:", " ".join(letter_world.responses))


# %%
def variance(weigh, c, G=4):
    """報酬に c を足したときの、勾配の見積もりの、全成分の分散の和。"""
    logps = letter_world.log_probs(ref_letters)[0]
    groups, chance = all_groups(logps, G)
    r = r_letters + c
    weights = weigh(r[groups], logps.exp() @ r)
    scores = torch.eye(4, dtype=torch.float64) - logps.exp()
    estimates = (weights[..., None] * scores[groups]).mean(1)
    mean = chance @ estimates
    return (chance @ (estimates - mean) ** 2).sum().item()


# %%
import pandas as pd

ways = {
    "REINFORCE": lambda r, mean: r,
    "本当の平均を引く": lambda r, mean: r - mean,
    "RLOO": lambda r, mean: 4 / 3 * (r - r.mean(-1, keepdim=True)),
}
variances = pd.DataFrame({
    f"報酬 + {c}": {name: variance(way, c) for name, way in ways.items()}
    for c in (0, 2, 10)})
variances.round(4)

# %%
reinforce, true_mean, rloo = variances.to_numpy()
claim("RLOO の分散は、報酬に足した定数によらない", rloo, rloo[0])
check("10 を足すと、REINFORCE の分散は 50 倍を超える",
      reinforce[2] > 50 * rloo[2], f"{reinforce[2] / rloo[2]:.0f} 倍")
check("報酬の平均が 0 に近ければ、引かないほうが小さい",
      reinforce[0] < rloo[0])
check("4 個の回答から見積もる雑音がある", rloo[0] > 1.5 * true_mean[0],
      f"本当の平均を引くときの {rloo[0] / true_mean[0]:.1f} 倍")

# %% [markdown]
# いつでも分散が減るわけではありません。報酬の平均がたまたま 0 に近ければ、少ない回答から平均を見積もる雑音のぶん、引いたほうが大きくなります。グループの平均を引く良さは、報酬の原点をどこにとっても、分散が変わらないことです。

# %% [markdown]
# ### ステップ 2：標準偏差で割る
#
# 式 (5.1) のアドバンテージは、平均を引いたうえで、グループの標準偏差で割ります。
#
# $$
# \widehat A_{i,t}=\frac{r_i-\mathrm{mean}(r_1,\dots,r_G)}{\mathrm{std}(r_1,\dots,r_G)}
# \tag{5.1}
# $$
#
# 標準偏差は、ここでは TRL に合わせて $G-1$ で割る形とし、分母に $10^{-4}$ を足します（報酬が全部同じグループでも 0 で割らないためです）。
#
# この割り算は何をするのでしょう。報酬が 0 か 1 で、正解の確率（全部の正解の回答の確率の和）が $p$ のプロンプトを考えます。グループに正解が $k$ 個あれば、標準偏差は $k$ だけで決まります。
#
# **主張** ステップ 1 と同じ条件（いまの方策から引く、系列の対数確率の和）なら、勾配の期待値は、正解率の勾配 $\nabla p$ の $w_G(p)$ 倍です（分母の $10^{-4}$ を除けば）。
#
# $$
# w_G(p)=\sqrt{\frac{G-1}{G}}\;\frac{\mathbb{E}_k\bigl[\sqrt{k(G-k)}\bigr]}{G\,p(1-p)},\qquad k\sim\mathrm{Bin}(G,p)
# $$
#
# 標準偏差で割らなければ、ステップ 1 のとおり、どのプロンプトでも $1-1/G$ 倍でした。つまり標準偏差で割ることは、 **プロンプトごとの重みを、正解率 $p$ によって変える** ことです。

# %%
import math


def prompt_weight(G, p, epsilon=0.0):
    """標準偏差で割ることが、正解率 p のプロンプトに与える重み w_G(p)。"""
    p = torch.as_tensor(p, dtype=torch.float64)
    total = torch.zeros_like(p)
    for k in range(1, G):
        chance = float(math.comb(G, k)) * p**k * (1 - p) ** (G - k)
        std = math.sqrt(k * (G - k) / (G * (G - 1)))
        total += chance * k * (G - k) / G**2 / (std + epsilon)
    return total / (p * (1 - p))


# %% [markdown]
# 主張の式は、 $\frac{k(G-k)}{G^2\,\mathrm{std}_k}$ に $\mathrm{std}_k=\sqrt{\frac{k(G-k)}{G(G-1)}}$ を入れて整理したものです。分母に $10^{-4}$ を足すときも同じ形で書けるので、関数では `epsilon` で選べるようにしました。
# まず回答が 2 つだけの世界（ `a` が正解）で、全部のグループを数え上げて確かめます。

# %%
coin = World(prompts=1, letters=1, max_length=1)  # 回答は $ と a


def standardised(rows, logps, mask):
    right = (rows == coin.responses.index("a")).double()
    return -(group_advantages(right, G) * logps.sum(-1)).mean()

# %%
for G, p in ((2, 0.05), (4, 0.05), (8, 0.05), (8, 0.5)):
    z = double([[[math.log(p / (1 - p)), 0.0]]])
    gradient = -expected_gradient(coin, z, G, standardised)[0, 0, 0]
    grad_p = p * (1 - p)  # p = σ(z) の、ロジット z についての微分
    claim(f"G = {G}、p = {p}: w_G(p)∇p", gradient,
          prompt_weight(G, p, 1e-4) * grad_p)

# %% [markdown]
# 正解が何通りあっても、回答が長くても同じです。はじめの世界で、15 通りの回答のうち 2 つを正解にしてみます。

# %%
is_right = torch.zeros(15, dtype=torch.float64)
is_right[[0, 8]] = 1
G, p = 4, (logps.exp() * is_right).sum()
grad_p = gradient_of(p, theta)


def standardised_sum(rows, logps, mask):
    advantages = group_advantages(is_right[rows], G)
    return -(advantages * (logps * mask).sum(-1)).mean()


gradient = -expected_gradient(world, theta, G, standardised_sum)
claim(f"p = {p:.3f}: w_G(p)∇p", gradient, prompt_weight(G, p, 1e-4) * grad_p)

# %% [markdown]
# $w_G(p)$ の形を読みます（ここからは、足した $10^{-4}$ を無視します）。
#
# - $G=2,\ 3$ では $p$ によらず一定です。標準偏差で割っても、全体が定数倍になるだけです。
# - $G\ge4$ では、 $p=1/2$ から離れたプロンプト（難しいものと、易しいもの）の重みが、相対的に大きくなります。
# - $G\to\infty$ では $1/\sqrt{p(1-p)}$ に近づきます。

# %%
grid = torch.linspace(0.01, 0.99, 99).double()
for G, constant in ((2, math.sqrt(1 / 2)), (3, 2 / math.sqrt(3))):
    claim(f"w_{G}(p) は一定", prompt_weight(G, grid), constant)

# %%
more = {G: (prompt_weight(G, 0.05) / prompt_weight(G, 0.5)).item()
        for G in (4, 8, 16, 64, 512)}
limit = math.sqrt(0.25 / (0.05 * 0.95))
for G, value in ((4, 1.06), (8, 1.33)):
    claim(f"G = {G}: p = .05 の重みは p = .5 の何倍か", more[G], value, 0.005)
check("G を大きくすると 1/√(p(1−p)) の比に近づく",
      abs(more[512] - limit) < 0.02 and limit > max(more.values()),
      "、".join(f"{G}: {v:.2f}" for G, v in more.items())
      + f"、極限 {limit:.2f}")

# %% [markdown]
# **報酬が全部同じグループ** では、分子が 0 なので、アドバンテージも勾配も 0 です（退化したグループ）。二値の報酬なら、その確率は $p^G+(1-p)^G$ です。

# %%
from companion.losses import degenerate_groups

p = 0.1819
coin_logps = double([1 - p, p]).log()
for G in (2, 4, 8):
    groups, chance = all_groups(coin_logps, G)
    same = degenerate_groups(groups.double().flatten(), G)
    claim(f"p = {p}、G = {G}: 退化する確率 = p^G + (1 − p)^G",
          chance[same].sum(), p**G + (1 - p)**G)

# %% [markdown]
# ### ステップ 3：回答ごとにトークンで平均する
#
# 式 (5.4) は、系列の対数確率の和ではなく、 $\frac1{|y_i|}\sum_t$ 、つまり回答の中での **トークンの平均** をとります。
# 生成した直後は $\pi_\theta=\pi_{\theta_{\mathrm{old}}}$ で、重要度比は 1 です。このとき、トークンの対数確率についての損失の勾配は $-\widehat A_i/(G|y_i|)$ です（B 行のバッチなら、 $G$ の代わりに B）。 `grpo_loss` は、式 (5.4) の符号を反転したパッケージの関数です（中身は「実装」で読みます）。

# %%
from companion.losses import grpo_loss

lengths = torch.tensor([4, 1, 2, 3])
mask = torch.arange(4) < lengths[:, None]
one_right = group_advantages(double([1, 0, 0, 0]), 4)
tokens = -torch.rand(4, 4, generator=g, dtype=torch.float64)

# %%
tokens.requires_grad_()
loss = grpo_loss(tokens, tokens.detach(), one_right, mask, epsilon=0.2)
(gradient,) = torch.autograd.grad(loss, tokens)
claim("∂L/∂log π = −A_i/(G|y_i|)", gradient,
      torch.where(mask, -(one_right / (4 * lengths))[:, None], 0.0))

# %% [markdown]
# **損失が 0 なのに学習が進むのはなぜか。** 比が 1 なら、損失の値は $-\frac1G\sum_i\widehat A_i$ で、アドバンテージの和は 0 ですから、いつでも 0 です（ $\beta=0$ のとき）。けれども、勾配は 0 ではありません。損失の値は、学習の進み具合について何も語らないのです。見るべきなのは、報酬と勾配のノルムです。
# トークンの平均をバッチ全体で一度にとる DAPO（5.3.3 節）では、0 になりません。同じデータで $-0.3$ です。これも、進み具合とは関係のない数です。

# %%
from companion.losses import dapo_loss

claim("GRPO の損失は 0", loss, 0.0)
check("勾配は 0 ではない", gradient.norm() > 0.1,
      f"ノルム {gradient.norm():.3f}")
claim("DAPO では −0.3",
      dapo_loss(tokens, tokens, one_right, mask, 0.2, 0.28), -0.3, tol=1e-4)

# %% [markdown]
# 回答の長さがどれも同じ $L$ なら、 $1/|y_i|$ はただの定数 $1/L$ です。長さがまちまちなら、勾配の **向き** が $\nabla J$ から外れます。短い回答のトークンほど強く押されるからです。
# 長さがそろった世界として、2 文字ちょうどの回答（EOS のロジットを $-\infty$ にします）を用意します。

# %%
pair_world = World(prompts=1, letters=3, max_length=2)
two = [i for i, y in enumerate(pair_world.responses) if "$" not in y]
print("2 文字の回答:", " ".join(pair_world.responses[i] for i in two))


def random_pairs(generator, *batch):
    logits = pair_world.random_logits(generator, *batch)
    logits[..., -1] = -torch.inf  # EOS は書かない
    return logits


# %%
def grpo_without_kl(rewards, G, scale="none"):
    def loss_of(rows, logps, mask):
        advantages = group_advantages(rewards[rows], G, scale)
        return grpo_loss(logps, logps, advantages, mask, epsilon=0.2)

    return loss_of


# %%
r_pairs = pair_world.random_rewards(g)[0]
pairs = random_pairs(g).requires_grad_()
J_pairs = expect(pair_world.log_probs(pairs).exp(), r_pairs).sum()
gradient = -expected_gradient(pair_world, pairs, 3,
                              grpo_without_kl(r_pairs, 3))
claim("長さがそろえば (1/L)(1 − 1/G)∇J", gradient,
      (1 - 1 / 3) / 2 * gradient_of(J_pairs, pairs))

# %%
gradient = -expected_gradient(world, theta, 3, grpo_without_kl(rewards, 3))
cosine = torch.nn.functional.cosine_similarity(
    gradient.flatten(), grad_J.flatten(), dim=0)
check("長さがまちまちなら、向きが ∇J と違う", cosine < 0.98,
      f"角度 {math.degrees(math.acos(cosine)):.0f}°")

# %% [markdown]
# この $1/|y_i|$ と、ステップ 2 の標準偏差を外したのが、次の 5.3.2 節の Dr. GRPO です。
#
# ### ステップ 4：重要度比とクリッピング
#
# 一度の生成で何度も更新すると、2 回目からは、データは少し前の方策 $\pi_{\theta_{\mathrm{old}}}$ のものになります。それを補正するのが重要度比 (5.5) です。
#
# $$
# w_{i,t}(\theta)=\frac{\pi_\theta(y_{i,t}\mid x,y_{i,<t})}{\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})}
# \tag{5.5}
# $$
#
# **主張** 回答全体の比 $\rho=\prod_tw_t$ なら、補正は正確です。 $\mathbb{E}_{\mathrm{old}}[\rho\,r]=\mathbb{E}_\theta[r]$ で、勾配も一致します。トークンごとの比 $w_t$ では、そうなりません（1 トークンの回答なら、二つは同じものです）。
#
# トークンごとの比には、その位置より前の接頭辞が「古い方策の出方」をしていること、後に続く文字が「古い方策の続け方」をしていることが、補正されずに残るからです。

# %%
old_pairs = random_pairs(g)
old_logps = pair_world.token_log_probs(old_pairs)[0, two]  # (9, 2)
token_logps = pair_world.token_log_probs(pairs)[0, two]
w = (token_logps - old_logps).exp()
drawn_by_old = old_logps.sum(-1).exp()
r9 = r_pairs[two]
by_sequence = (drawn_by_old * w.prod(-1) * r9).sum()
by_token = (drawn_by_old * w.mean(-1) * r9).sum()

# %%
claim("系列の比: E_old[ρ r] = E_θ[r]", by_sequence, J_pairs)
grad_J_pairs = gradient_of(J_pairs, pairs)
claim("系列の比: 勾配も一致", gradient_of(by_sequence, pairs), grad_J_pairs)

# %%
gap = (by_token - J_pairs).abs()
check("トークンの比では、値が違う", gap > 0.02, f"差 {gap:.3f}")
grad_token = 2 * gradient_of(by_token, pairs)  # 1/L = 1/2 を戻す
gap = (grad_token - grad_J_pairs).abs().max()
check("トークンの比では、勾配も違う", gap > 0.02, f"最大の成分の差 {gap:.3f}")

# %% [markdown]
# ただし $\theta=\theta_{\mathrm{old}}$ では、トークンの比の勾配も正しくなります。方策があまり動かないうちは、偏りも小さいのです。

# %%
same_old = token_logps.detach()
drawn_now = same_old.sum(-1).exp()
by_token = (drawn_now * (token_logps - same_old).exp().sum(-1) * r9).sum()
claim("θ = θ_old なら、トークンの比でも ∇J",
      gradient_of(by_token, pairs), grad_J_pairs)

# %% [markdown]
# では、どれだけ動いたら止めるか。それを決めるのが $\min$ と $\mathrm{clip}$ です。一つのトークンの $\widehat W$ を、比 $w$ の関数として描きます。

# %%
from companion.losses.surrogate import clipped_surrogate
from companion.plots import COLOURS, GREY, figure

x = torch.linspace(0.4, 1.8, 281).double()
drawn, (axes,) = figure(1, 2, panel=(4.2, 2.8))
for ax, A in zip(axes, (1.0, -1.0), strict=True):
    advantage = double(A)
    ax.plot(x, x * A, color=GREY, linestyle=":", label="クリップしない w·A")
    ax.plot(x, clipped_surrogate(x.log(), advantage, 0.2, 0.2),
            color=COLOURS[0], label="min をとった後（ε = 0.2）")
    ax.axvline(1, color=GREY, linewidth=0.6)
    ax.set(title=f"A = {A:+g}", xlabel="重要度比 w")
axes[0].set_ylabel("トークンの目的関数")
drawn.legend(*axes[0].get_legend_handles_labels(),
             loc="outside lower center", ncols=2)
drawn

# %% [markdown]
# 良い回答（ $A>0$ ）は $w>1+\epsilon$ で、悪い回答（ $A<0$ ）は $w<1-\epsilon$ で、つまり **もう十分に動いた側** で平らになり、勾配が 0 になります。間違った向きに動いてしまった側（ $A<0$ で $w>1$ など）では、切られません。どこまでも引き戻します。

# %%
for r, A, value, slope in ((1.5, 1.0, 1.2, 0.0), (1.5, -1.0, -1.5, -1.5),
                           (0.5, 1.0, 0.5, 0.5), (0.5, -1.0, -0.8, 0.0)):
    log_r = double(r).log().requires_grad_()
    objective = clipped_surrogate(log_r, double(A), 0.2, 0.2)
    (found,) = torch.autograd.grad(objective, log_r)
    claim(f"w = {r}、A = {A:+g}: 値と、log w についての傾き",
          [objective.detach(), found], [value, slope], tol=1e-6)

# %% [markdown]
# **ε を変えても何も変わらないことがあるのはなぜか。** 一度の生成で一度しか更新しないなら、その更新は $\theta=\theta_{\mathrm{old}}$ で行われます。 $w$ はちょうど 1 で、 $\epsilon>0$ なら、いつでも切られない範囲の中です。サポートページの設定は、これにあたります（「式と TRL の違い」で測ります）。

# %%
gradients = []
for epsilon in (0.2, 1e-6):
    loss = grpo_loss(tokens, tokens.detach(), one_right, mask, epsilon)
    gradients.append(torch.autograd.grad(loss, tokens)[0])
claim("w = 1 なら、ε = 0.2 でも 1e-6 でも同じ勾配", *gradients, tol=1e-15)

# %% [markdown]
# ### ステップ 5：KL の推定量
#
# 最後の因子は、参照方策からの KL ダイバージェンスです。言語モデルでは、KL を正確に計算するには語彙全体の和が要るので、引いたトークンだけから見積もります。 $d=\log\pi_{\mathrm{ref}}-\log\pi_\theta$ と書くと、よく知られた推定量が三つあります（Schulman）。
#
# $$
# k_1=-d,\qquad k_2=\tfrac12d^2,\qquad k_3=e^{d}-d-1
# $$
#
# GRPO の (5.7) は $k_3$ です。問いは二つあります。 **値** は KL の推定として正しいか。そして、損失に入れて微分したとき、その **勾配** は何の勾配か。二つの答えは別々です。
#
# 2 つの行動だけの世界で、期待値を正確に計算します。 $\theta$ は行動 2 のロジットです。データが $\pi_\theta$ 自身から引かれるとき（方策オン）と、別の $\pi_{\mathrm{old}}$ から引かれるとき（方策オフ）、さらに重要度比 $w=\pi_\theta/\pi_{\mathrm{old}}$ を掛けたときを並べます。はじめの表は、読み比べる相手になる、二つの向きの KL です。

# %%
def log_policy(p2):
    return double([1 - p2, p2]).log()


def estimators(logps, ref_logps):
    d = ref_logps - logps
    return {"k1": -d, "k2": d**2 / 2, "k3": d.expm1() - d}


# %%
def value_and_slope(p2, ref, old=None, with_ratio=False):
    """E[k] と、k を損失として微分した勾配の期待値。引く方策は固定する。"""
    z = double(math.log(p2 / (1 - p2))).requires_grad_()
    logps = torch.stack([torch.zeros_like(z), z]).log_softmax(0)
    mu = (logps if old is None else old).detach()
    w = (logps - mu).exp() if with_ratio else torch.ones(2).double()
    pairs = {}
    for name, k in estimators(logps, ref).items():
        mean = (mu.exp() * w * k).sum()
        pairs[name] = mean.item(), gradient_of(mean, z).item()
    return pairs


# %%
P2, REF, OLD = 0.4, log_policy(0.8), log_policy(0.7)
z = double(math.log(P2 / (1 - P2))).requires_grad_()
logps_2 = torch.stack([torch.zeros_like(z), z]).log_softmax(0)[None]
both = {"KL(π‖π_ref)": kl(logps_2, REF[None]),
        "KL(π_ref‖π)": kl(REF[None], logps_2)}
exact = pd.DataFrame({
    "値": {name: d.item() for name, d in both.items()},
    "勾配": {name: gradient_of(d.sum(), z).item()
           for name, d in both.items()}})
exact.round(4)

# %%
settings = {"方策オン": {}, "方策オフ": dict(old=OLD),
            "方策オフ、比つき": dict(old=OLD, with_ratio=True)}
three = {}
for title, options in settings.items():
    for name, (value, slope) in value_and_slope(P2, REF, **options).items():
        three.setdefault((title, "値"), {})[name] = value
        three.setdefault((title, "勾配"), {})[name] = slope
three = pd.DataFrame(three)
three.round(4)

# %% [markdown]
# **値**：方策オンなら、 $k_1$ と $k_3$ は不偏です。 $k_2$ は偏っています。方策オフでは、どれも KL の推定になりません。比を掛ければ、方策オンの値に戻ります。

# %%
true_kl, slopes = exact.loc["KL(π‖π_ref)", "値"], exact["勾配"]
for name in ("k1", "k3"):
    claim(f"{name} は方策オンで不偏", three.loc[name, ("方策オン", "値")],
          true_kl)
on, off, corrected = (three[title] for title in settings)
check("k2 の値は偏っている", abs(on.loc["k2", "値"] - true_kl) > 0.01)
gap = (off["値"] - true_kl).abs()
check("方策オフでは、どれも KL の値にならない", gap.min() > 0.02,
      f"ずれ {gap.min():.3f} 以上")
claim("比を掛ければ、方策オンの値に戻る", corrected["値"], on["値"])

# %% [markdown]
# **勾配**：方策オンで損失に入れると、 $k_1$ の勾配は 0 です（ $\mathbb{E}[\nabla\log\pi]=0$ なので、何も起きません）。値の偏っていた $k_2$ が、 $D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]$ の勾配を与えます。そして、値の正しい $k_3$ は、 **逆向き** の $D_{\mathrm{KL}}[\pi_{\mathrm{ref}}\|\pi]$ の勾配を与えます。 $\nabla k_3=(1-\pi_{\mathrm{ref}}/\pi)\nabla\log\pi$ の期待値をとれば、 $-\sum\pi_{\mathrm{ref}}\nabla\log\pi$ が残るからです。
#
# 比を掛けてから微分すると、 $\mathbb{E}_{\mathrm{old}}[w\,k]=\mathbb{E}_\pi[k]$ そのものの勾配になるので、 $k_1$ でも $k_3$ でも $\nabla D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]$ です。方策オンでも、比は値こそ 1 ですが勾配を持つので、掛けるかどうかで勾配が変わります。

# %%
claim("k1 の勾配は 0", on.loc["k1", "勾配"], 0.0)
claim("k2 の勾配は ∇KL(π‖π_ref)", on.loc["k2", "勾配"],
      slopes["KL(π‖π_ref)"])
claim("k3 の勾配は ∇KL(π_ref‖π)", on.loc["k3", "勾配"],
      slopes["KL(π_ref‖π)"])
for name in ("k1", "k3"):
    claim(f"比を掛けた {name} の勾配は ∇KL(π‖π_ref)",
          corrected.loc[name, "勾配"], slopes["KL(π‖π_ref)"])
on_with_ratio = value_and_slope(P2, REF, with_ratio=True)
claim("方策オンで比を掛けても同じ",
      on_with_ratio["k3"][1], slopes["KL(π‖π_ref)"])

# %%
off_by_hand = 0.3 * (1 - 0.2 / 0.6) * (-0.4) + 0.7 * (1 - 0.8 / 0.4) * 0.6
claim("方策オフの k3 の勾配（手計算）", off.loc["k3", "勾配"], off_by_hand)
check("方策オフの k3 の勾配は、どちらの向きの KL とも違う",
      (slopes - off_by_hand).abs().min() > 0.02,
      f"{off_by_hand:.4f}")

# %% [markdown]
# **2 トークン以上の回答では**、接頭辞 $s$ ごとの KL を考えます。系列の KL は、 $\pi_\theta$ で訪れる接頭辞についての、KL の和の期待値です。
#
# **主張** 接頭辞が $\pi_\theta$ 自身から引かれるなら、 $\mathbb{E}_{y\sim\pi_\theta}[\sum_tk_3(y_t)]=D_{\mathrm{KL}}[\pi_\theta\|\pi_{\mathrm{ref}}]$ です。接頭辞が $\pi_{\mathrm{old}}$ から引かれるときは、比を掛けて、その接頭辞での KL が得られます。

# %%
from companion.losses import kl_k3

ref_theta, old_theta = world.random_logits(g), world.random_logits(g)
table, ref_table, old_table = (
    world.token_log_probs(t)[0] for t in (theta, ref_theta, old_theta))
k3 = kl_k3(table, ref_table)  # マスクの下は 0
prob, old_prob = table.sum(-1).exp(), old_table.sum(-1).exp()
step_logps, step_ref = theta.log_softmax(-1)[0], ref_theta.log_softmax(-1)[0]
prefix_kl = (step_logps.exp() * (step_logps - step_ref)).sum(-1)
kl_here = torch.where(world.mask, prefix_kl[world.prefixes], 0.0)  # (Y, T)

# %%
sequence_kl = kl(world.log_probs(theta), world.log_probs(ref_theta))[0]
claim("E_π[Σ_t k3] = KL(π‖π_ref)", prob @ k3.sum(-1), sequence_kl)
w = (table - old_table).exp()
claim("E_old[Σ_t w·k3] = 古い接頭辞での KL の和",
      old_prob @ (w * k3).sum(-1), old_prob @ kl_here.sum(-1))
gap = (old_prob @ k3.sum(-1) - old_prob @ kl_here.sum(-1)).abs()
check("比を掛けなければ、偏る", gap > 0.1, f"ずれ {gap:.3f}")

# %% [markdown]
# 式 (5.4) のように $1/|y_i|$ を掛けると、方策オンでも偏ります。長さは、その位置より後（と、その位置）で何を書くかによるので、接頭辞だけでは決まらないからです。

# %%
def two_means(theta, ref_theta):
    """方策オンでの、1/|y| を掛けた k3 と、掛けた本当の KL の期待値。"""
    logps, ref_logps = (world.token_log_probs(t) for t in (theta, ref_theta))
    step, ref_step = theta.log_softmax(-1), ref_theta.log_softmax(-1)
    prefix_kl = (step.exp() * (step - ref_step)).sum(-1)[..., world.prefixes]
    return [(logps.sum(-1).exp() * (world.mask * k).sum(-1)
             / world.mask.sum(-1)).sum(-1).squeeze(-1)
            for k in (kl_k3(logps, ref_logps), prefix_kl)]

# %%
estimate, wanted = two_means(*world.random_logits(g, 2, 200))
bias = (estimate / wanted - 1).abs()
check("1/|y| を掛けると、方策オンでも偏る（200 組の方策）",
      bias.quantile(0.5) > 0.01 and bias.max() > 0.2,
      f"ずれの中央値 {bias.quantile(0.5):.1%}、最大 {bias.max():.0%}")

# %% [markdown]
# 勾配も、接頭辞ごとに読めます。訪れる接頭辞を固定すれば、 $k_3$ の勾配は、それぞれの接頭辞での $D_{\mathrm{KL}}[\pi_{\mathrm{ref}}(\cdot\mid s)\|\pi_\theta(\cdot\mid s)]$ の勾配です。

# %%
reverse_kl = (step_ref.exp() * (step_ref - step_logps)).sum(-1)
reverse_here = torch.where(world.mask, reverse_kl[world.prefixes], 0.0)
visits = prob.detach()
claim("E_π[Σ∇k3] = E_π[Σ_s ∇KL(π_ref‖π)]",
      gradient_of(visits @ k3.sum(-1), theta),
      gradient_of(visits @ reverse_here.sum(-1), theta))

# %% [markdown]
# $k_3$ は、 $e^d\ge1+d$ なので負になりません。ただし、 $e^d-d-1$ をそのまま float32 で計算すると、小さな $d$ では桁が落ちて負になることがあります。パッケージの `kl_k3` は `expm1` （ $e^d-1$ を桁落ちなしに計算する関数）を使います。

# %%
d = 1e-3 * torch.randn(10_000, generator=g)  # float32
naive, ours = d.exp() - d - 1, kl_k3(torch.zeros_like(d), d)
check("そのまま書くと、負になるものがある", (naive < 0).any(),
      f"{(naive < 0).float().mean():.1%} が負、最小 {naive.min():.0e}")
check("expm1 を使えば、丸めの範囲で 0 以上", ours.min() >= -1e-9,
      f"最小 {ours.min():.0e}")

# %% [markdown]
# ### ステップ 6：KL の項は、方策をどこへ連れて行くか
#
# RLHF の目的関数 (4.9)、つまり $\mathbb{E}[r]-\beta D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]$ を最大にするのは $\pi^*\propto\pi_{\mathrm{ref}}\exp(r/\beta)$ でした（4.5.1 節）。GRPO の行き先（勾配の期待値が 0 になる方策）も、そこでしょうか。ステップ 5 で見たとおり、損失に入れた $k_3$ の勾配は逆向きの KL のものなので、違うはずです。
#
# **主張** 回答が 1 トークン、方策オン、標準偏差で割らないとき、式 (5.4) の勾配の期待値が 0 になるのは、次の方策です。
#
# $$
# \pi(y)=\frac{\beta'\,\pi_{\mathrm{ref}}(y)}{\lambda-r(y)},\qquad \beta'=\frac{\beta G}{G-1},\qquad \lambda=\beta'+\mathbb{E}_\pi[r]
# $$
#
# $\beta'$ が出てくるのは、ステップ 1 のとおり、報酬の側だけが $1-1/G$ 倍になるからです。 $\lambda$ は、確率の和が 1 になるように決まります（ $\lambda>\max r$ に、ただ一つあります）。以下、 $\pi_{\mathrm{ref}}\exp(r/\beta')$ に比例する方策を「 $\beta'$ の $\pi^*$ 」と書きます。
#
# ロジットについての勾配は、報酬の側が $(1-\frac1G)\,\pi(y)(r(y)-\mathbb{E}_\pi[r])$、KL の側が $-\beta(\pi(y)-\pi_{\mathrm{ref}}(y))$ です。和を 0 とおいて $\pi$ について解けば、上の式になります。

# %%
def listing_point(ref_logps, q, beta):
    """π = β π_ref/(λ − q) の対数。λ は二分法で求める（最後の次元が回答）。"""
    low = q.amax(-1, keepdim=True)
    high = low + beta
    for _ in range(100):
        middle = (low + high) / 2
        total = (beta * ref_logps.exp() / (middle - q)).sum(-1, keepdim=True)
        low = torch.where(total > 1, middle, low)
        high = torch.where(total > 1, high, middle)
    return ref_logps + (beta / (high - q)).log()


# %%
G, beta = 4, 0.3
beta_eff = beta * G / (G - 1)  # β'
letter_ref = letter_world.log_probs(ref_letters)[0]
listing = listing_point(letter_ref, r_letters, beta_eff)
star = tilt(letter_ref[None], r_letters / beta_eff)[0]  # β' の π*
mean_reward = (listing.exp() * r_letters).sum()
claim("Σ_y π(y) = 1", listing.exp().sum(), 1.0)
claim("λ = β' + E_π[r]", beta_eff * (letter_ref - listing).exp() + r_letters,
      beta_eff + mean_reward)


# %%
def page_loss(ref_table, rewards, scale):
    """サポートページの損失（k3 をそのまま入れる）。"""
    def loss_of(rows, logps, mask):
        advantages = group_advantages(rewards[rows], G, scale)
        return grpo_loss(logps, logps, advantages, mask, 0.2,
                         ref_logps=ref_table[rows], beta=beta)

    return loss_of


# %%
def slope_at(logps, scale="none"):
    theta = letter_world.logits_of(logps[None])
    loss_of = page_loss(letter_ref[:, None], r_letters, scale)
    return expected_gradient(letter_world, theta, G, loss_of)


# %%
claim("そこで (5.4) の勾配 = 0", slope_at(listing), torch.zeros(()),
      tol=1e-12)
same_beta = tilt(letter_ref[None], r_letters / beta)[0]  # β の π*
for name, logps in (("β' の π*", star), ("β の π*", same_beta)):
    biggest = slope_at(logps).abs().max()
    check(f"{name} では 0 でない", biggest > 1e-2, f"最大 {biggest:.3f}")

# %% [markdown]
# **標準偏差で割ると**（サポートページの設定です）、行き先はまた別の、三つ目の点です。きれいな式はないので、方程式を数値で解きます。回答 $y$ のアドバンテージの期待値を $a(y)$ （自分が $y$ のとき、ほかの $G-1$ 個について平均したもの）と書くと、ロジットについての勾配は $\pi(y)\,a(y)-\beta(\pi(y)-\pi_{\mathrm{ref}}(y))$ です。これが 0 になるところを、ニュートン法で探します。

# %%
def logit_slope(z, scale):
    """式 (5.4) の勾配の期待値（ロジットについて、1 トークン）。"""
    p, y = z.softmax(0), torch.arange(4)
    groups = torch.cartesian_prod(*[y] * G)
    first = group_advantages(r_letters[groups].flatten(), G, scale)[::G]
    chance = p[groups[:, 1:]].prod(-1)
    a = torch.zeros(4).double().index_add(0, groups[:, 0], chance * first)
    return p * a - beta * (p - letter_ref.exp())

# %%
z = listing.clone()
for _ in range(20):
    jacobian = torch.autograd.functional.jacobian(
        lambda v: logit_slope(v, "group"), z)
    step = torch.linalg.lstsq(jacobian, logit_slope(z, "group")[:, None])
    z = z - step.solution[:, 0]
standardised_point = z.log_softmax(0)

# %%
claim("標準偏差で割ったとき、そこで (5.4) の勾配 = 0",
      slope_at(standardised_point, "group"), torch.zeros(()), tol=1e-12)
for name, logps in (("割らないときの行き先", listing), ("β' の π*", star)):
    biggest = slope_at(logps, "group").abs().max()
    check(f"{name}では 0 でない", biggest > 1e-2, f"最大 {biggest:.3f}")

# %%
points = {"π_ref": letter_ref, "π*（β′）": star,
          "式 (5.4)、標準偏差なし": listing,
          "式 (5.4)、標準偏差あり": standardised_point}
drawn, ((ax,),) = figure(1, 1, panel=(6.6, 3.0))
places = torch.arange(4)
for i, (name, logps) in enumerate(points.items()):
    colour = [GREY, *COLOURS][i]
    ax.bar(places + 0.2 * (i - 1.5), logps.exp(), 0.2, color=colour,
           label=name)
ax.set_xticks(places, [f"{y}\nr = {r:+.2f}" for y, r in zip(
    letter_world.responses, r_letters, strict=True)])
ax.set(title="参照方策と、三つの行き先", ylabel="回答の確率")
ax.legend()
drawn

# %% [markdown]
# 形の違いは、 $\pi/\pi_{\mathrm{ref}}$ を見ると分かります。 $\pi^*$ では $e^{r/\beta'}$ に比例し、報酬が低い回答は指数的に消えます。 $k_3$ を損失に入れると（標準偏差なしで） $\beta'/(\lambda-r)$ で、報酬がどれだけ低くても、確率は $1/|r|$ の速さでしか減りません。 $D_{\mathrm{KL}}[\pi_{\mathrm{ref}}\|\pi]$ は、 $\pi_{\mathrm{ref}}$ が書く回答の確率を 0 にすることを許さないからです。
# 二値の報酬でも見てみましょう。あとの「学習」と同じく、参照方策の正解率がおよそ 0.4、 $\beta=0.04,\ G=8$ なら、1 トークンの表形式の方策の行き先は、次のとおりです。

# %%
small, eight = 0.04 * 8 / 7, 8
ref_2 = double([0.6, 0.4]).log()  # 間違い、正解
r_2 = double([0.0, 1.0])
low, high = double([0.4, 1 - 1e-12])
for _ in range(100):  # w_G(p) p(1 − p) = β(p − p_ref) を二分法で解く
    p = (low + high) / 2
    up = prompt_weight(eight, p, 1e-4) * p * (1 - p) > 0.04 * (p - 0.4)
    low, high = (p, high) if up else (low, p)

# %%
wrong = {
    "π*（β′）": tilt(ref_2[None], r_2 / small)[0, 0].exp().item(),
    "標準偏差なし": listing_point(ref_2, r_2, small)[0].exp().item(),
    "標準偏差あり": 1 - p.item(),
}
check("標準偏差なしでは、間違いが数 % 残る",
      0.01 < wrong["標準偏差なし"] < 0.05)
check("標準偏差ありでは、1 % 前後", 0.003 < wrong["標準偏差あり"] < 0.02)
check("π* では、無いに等しい", wrong["π*（β′）"] < 1e-8)
pd.DataFrame(wrong, index=["行き先での間違いの確率"]).map("{:.1e}".format)

# %% [markdown]
# **長い回答では**、同じことが接頭辞ごとに起こります。報酬 $r$ の代わりに、その接頭辞でその文字を書いた後の報酬の期待値 $Q^\pi(s,a)$ が入ります。
#
# $$
# \pi(a\mid s)=\frac{\beta'\,\pi_{\mathrm{ref}}(a\mid s)}{\lambda_s-Q^\pi(s,a)},\qquad\lambda_s=\beta'+\mathbb{E}_{a\sim\pi(\cdot\mid s)}[Q^\pi(s,a)]
# $$
#
# 条件は、方策オン、標準偏差なし、長さがそろっていること（ $1/|y_i|$ が定数であること）です。2 文字の世界なら、2 文字目では $Q^\pi=r$ なのですぐに解け、その期待値を $Q^\pi$ として 1 文字目が解けます。

# %%
def letter_by_letter(solve, ref_logits, rewards):
    """2 文字目、1 文字目の順に solve(log π_ref, Q) で決めた方策。"""
    ref = ref_logits[..., :3].log_softmax(-1)  # 接頭辞は 空, a, b, c
    r = rewards[..., two].unflatten(-1, (3, 3))
    second = solve(ref[..., 1:, :], r)
    first = solve(ref[..., 0, :], (second.exp() * r).sum(-1))
    logps = torch.full_like(rewards, -torch.inf)
    logps[..., two] = (first[..., None] + second).flatten(-2)
    return logps


def by_listing(ref_logps, q):
    return listing_point(ref_logps, q, beta_eff)


# %%
pair_ref = random_pairs(torch.Generator().manual_seed(2))
pair_ref_table = pair_world.token_log_probs(pair_ref)[0]
pair_listing = letter_by_letter(by_listing, pair_ref, r_pairs[None])
pair_star = tilt(pair_world.log_probs(pair_ref), r_pairs / beta_eff)


def pair_slope(logps, loss_of):
    theta = pair_world.logits_of(logps)
    return expected_gradient(pair_world, theta, G, loss_of)[..., :3]

# %%
page = page_loss(pair_ref_table, r_pairs, "none")
claim("2 文字でも、そこで (5.4) の勾配 = 0", pair_slope(pair_listing, page),
      torch.zeros(()), tol=1e-12)
biggest = pair_slope(pair_star, page).abs().max()
check("π* では 0 でない", biggest > 1e-2, f"最大 {biggest:.3f}")

# %% [markdown]
# しかも、2 文字以上の回答では、この「勾配」は **どんな関数の勾配でもありません**。ある関数の勾配なら、そのヤコビ行列（2 階微分の行列）は対称のはずです。ロジットについての式を書いて、調べます。接頭辞 $s$ を訪れる確率を $d(s)$ 、 $Q^\pi(s,\cdot)$ の平均を $V^\pi(s)$ とすると、 $d(s)\bigl[(1-\frac1G)\pi(a\mid s)(Q^\pi(s,a)-V^\pi(s))-\beta(\pi(a\mid s)-\pi_{\mathrm{ref}}(a\mid s))\bigr]$ です（全体に掛かる $1/L$ は省きます）。

# %%
ref_steps = pair_ref[0, :, :3].softmax(-1)


def pair_field(z, beta):
    """接頭辞 (空, a, b, c) × 文字の、勾配の期待値。"""
    p, r = z.softmax(-1), r_pairs[two].unflatten(0, (3, 3))
    q = torch.cat([(p[1:] * r).sum(-1)[None], r])
    visit = torch.cat([torch.ones(1).double(), p[0]])[:, None]
    centred = q - (p * q).sum(-1, keepdim=True)
    return visit * ((1 - 1 / G) * p * centred - beta * (p - ref_steps))


here = torch.randn(4, 3, generator=g, dtype=torch.float64)
full = torch.cat([here, torch.full((4, 1), -torch.inf).double()], -1)[None]
gradient = -expected_gradient(pair_world, full, G, page)[0, :, :3]
claim("数え上げた勾配 = 式 ÷ L", gradient, pair_field(here, beta) / 2)


# %%
def asymmetry(field, z):
    jacobian = torch.autograd.functional.jacobian(field, z)
    square = jacobian.reshape(z.numel(), z.numel())
    return (square - square.T).abs().max()

# %%
claim("β = 0 なら対称（∇J なので）",
      asymmetry(lambda z: pair_field(z, 0.0), here), 0.0)
claim("1 トークンなら、β > 0 でも対称",
      asymmetry(lambda z: logit_slope(z, "none"), letter_ref), 0.0)
twisted = asymmetry(lambda z: pair_field(z, beta), here)
check("2 文字で β > 0 なら、対称でない", twisted > 1e-3, f"{twisted:.4f}")

# %% [markdown]
# 訪れる接頭辞を固定したまま KL の勾配をとるので、「ここでこの文字を書くと、後で KL の大きい接頭辞へ行きやすくなる」という効果が抜け落ちているのです。
#
# **比を掛けた $k_3$** （TRL の `use_bias_correction_kl=True` 、既定値）なら、接頭辞ごとの KL の向きは正しくなります。1 トークンなら、行き先はちょうど $\beta'$ の $\pi^*$ です。しかし、長い回答では、訪れる接頭辞はやはり固定されたままなので、 $\pi^*$ には着きません。

# %%
def corrected_loss(logps, advantages, mask, ref_logps, beta):
    """方策オンで、k3 に重要度比を掛ける形。"""
    ratio = (logps - logps.detach()).exp()
    kl = ratio * kl_k3(logps, ref_logps)
    per_response = (kl * mask).sum(-1) / mask.sum(-1)
    policy = grpo_loss(logps, logps, advantages, mask, epsilon=0.2)
    return policy + beta * per_response.mean()


def corrected_page(ref_table, rewards):
    def loss_of(rows, logps, mask):
        advantages = group_advantages(rewards[rows], G, scale="none")
        return corrected_loss(logps, advantages, mask, ref_table[rows], beta)

    return loss_of


# %%
letter_loss = corrected_page(letter_ref[:, None], r_letters)
star_theta = letter_world.logits_of(star[None])
claim("1 トークンなら、π* で ∇ = 0",
      expected_gradient(letter_world, star_theta, G, letter_loss),
      torch.zeros(()), tol=1e-12)
pair_loss = corrected_page(pair_ref_table, r_pairs)
biggest = pair_slope(pair_star, pair_loss).abs().max()
check("2 文字では、π* で 0 でない", biggest > 1e-3, f"最大 {biggest:.4f}")

# %%
pair_corrected = letter_by_letter(
    lambda ref, q: (ref + q / beta_eff).log_softmax(-1),
    pair_ref, r_pairs[None])
claim("2 文字で 0 になるのは、接頭辞ごとに Q で傾けた方策",
      pair_slope(pair_corrected, pair_loss), torch.zeros(()), tol=1e-12)
print(f"そこから π* まで KL {kl(pair_corrected, pair_star).item():.4f} nat")

# %% [markdown]
# **KL を報酬のほうに入れる** と、どうでしょうか。RLOO や PPO（式 (4.10)）のやり方で、報酬を $R=r-\beta\sum_tk_1=r-\beta\log\frac{\pi_\theta(y)}{\pi_{\mathrm{ref}}(y)}$ とし（データとして扱い、微分しません）、損失の側の $\beta$ は 0 にします。
#
# **主張** $\pi^*$ では $R=\beta\log Z(x)$ で、どの回答でも同じです。したがって、どのグループも退化し、アドバンテージはすべて 0 です。回答の長さがまちまちでも、 $1/|y_i|$ や標準偏差があっても、 **いつでも** $\pi^*$ で勾配が 0 になります。しかも、ここには $\beta'$ でなく $\beta$ が入ります（報酬も KL も、同じ $1-1/G$ 倍になるからです）。

# %%
from companion.exact import log_partition

ref_seq = world.log_probs(ref_theta)[0]
world_star = tilt(ref_seq[None], rewards / beta)[0]
in_reward = rewards - beta * (world_star - ref_seq)
log_Z = log_partition(ref_seq[None], rewards / beta)
claim("π* では、どの回答も R = β log Z", in_reward, beta * log_Z)

# %%
star_theta = world.logits_of(world_star[None])
for scale in ("none", "group"):
    slope = expected_gradient(world, star_theta, 3,
                              grpo_without_kl(in_reward, 3, scale))
    claim(f"scale = {scale}: π* で ∇ = 0", slope, torch.zeros(()), tol=1e-11)

# %% [markdown]
# まとめると、KL の入れ方による行き先は、次のとおりです（方策オン、表形式の方策）。 $k_3$ の「2 文字以上」は、長さがそろうときです。
#
# | KL の入れ方 | 1 トークン | 2 文字以上 |
# |---|---|---|
# | $k_3$ を損失に | $\frac{\beta'\pi_{\mathrm{ref}}}{\lambda-r}$ | 接頭辞ごとに、 $Q^\pi$ で同じ形 |
# | $k_3$ を損失に、標準偏差あり | 三つ目の点 | – |
# | 比つきの $k_3$ を損失に | $\beta'$ の $\pi^*$ | 接頭辞ごとに、 $e^{Q^\pi/\beta'}$ で傾けた方策 |
# | $k_1$ を報酬に | $\beta$ の $\pi^*$ | $\beta$ の $\pi^*$ |
#
# どの形が「正しい」ということではありません。 $\pi^*$ に着くことが目的なら $k_1$ を報酬に、参照方策が書くものを捨てたくないなら $k_3$ を損失に、と選べます（両方に入れると KL を二重に数えるので、報酬関数に自分で KL を書くときは、TRL の `beta` を 0 にします）。実験 1 では、サンプルを引く学習で、それぞれが本当にそこへ着くことを見ます。

# %% [markdown]
# ## 実装
#
# 式 (5.1) と (5.4) を、そのまま NumPy で書きます。回答の長さはまちまちなので、対数確率は「回答ごとの列」をリストに入れて渡します。

# %%
import numpy as np


def group_advantages_numpy(rewards, G):
    advantages = []
    for start in range(0, len(rewards), G):
        group = rewards[start:start + G]
        mean = sum(group) / G
        std = np.sqrt(sum((r - mean) ** 2 for r in group) / (G - 1))
        advantages += [(r - mean) / (std + 1e-4) for r in group]  # (5.1)
    return np.array(advantages)


# %%
def grpo_loss_numpy(logps, old_logps, ref_logps, advantages, epsilon, beta):
    total = 0.0
    for i in range(len(logps)):
        inner = 0.0
        for t in range(len(logps[i])):
            w = np.exp(logps[i][t] - old_logps[i][t])  # (5.5)
            clipped = min(max(w, 1 - epsilon), 1 + epsilon)
            objective = min(w * advantages[i], clipped * advantages[i])
            d = ref_logps[i][t] - logps[i][t]
            inner += objective - beta * (np.exp(d) - d - 1)  # (5.7)
        total += inner / len(logps[i])
    return -total / len(logps)  # (5.4) の符号を反転


# %% [markdown]
# パッケージの関数は、同じ式をベクトルで書いた PyTorch 版です（説明の文は省いて表示します）。入力の検査のあと、最後の数行が式です。 `clipped_surrogate` は、5.3.2〜5.3.4 節の手法と共通です。

# %%
import inspect
import re

for function in (grpo_loss, kl_k3, clipped_surrogate):
    code = inspect.getsource(function)
    print(re.sub(r'    """.*?"""\n', "", code, flags=re.DOTALL))

# %% [markdown]
# 3 つのグループ、長さの違う 12 個の回答で、2 つの実装を比べます。方策オフ（ $\theta\ne\theta_{\mathrm{old}}$ ）にしておかないと、クリッピングの誤りは見つかりません。

# %%
rng = np.random.default_rng(0)
lengths = rng.integers(1, 7, size=12)
new_tokens = [-rng.exponential(1.0, size=n) for n in lengths]
old_tokens = [y + rng.normal(0, 0.3, size=len(y)) for y in new_tokens]
ref_tokens = [y + rng.normal(0, 0.5, size=len(y)) for y in new_tokens]
r_12 = rng.normal(size=12)


# %%
def padded(rows):
    """詰め物に大きな値を入れて、(B, T) にする。"""
    table = torch.full((len(rows), 6), 99.0, dtype=torch.float64)
    for i, row in enumerate(rows):
        table[i, :len(row)] = torch.tensor(row)
    return table


# %%
A_numpy = group_advantages_numpy(r_12, 4)
A_torch = group_advantages(torch.tensor(r_12), 4)
claim("アドバンテージ: NumPy = PyTorch", A_numpy, A_torch, tol=1e-12)

# %%
new, old, ref = map(padded, (new_tokens, old_tokens, ref_tokens))
mask_12 = torch.arange(6) < torch.tensor(lengths)[:, None]
for b in (0.0, 0.04):
    claim(f"損失（β = {b}）: NumPy = PyTorch",
          grpo_loss_numpy(new_tokens, old_tokens, ref_tokens, A_numpy,
                          0.2, b),
          grpo_loss(new, old, A_torch, mask_12, 0.2, ref, b), tol=1e-12)

# %%
ratio = torch.where(mask_12, new - old, 0.0).exp()
stopped = ((ratio > 1.2) & (A_torch[:, None] > 0)
           | (ratio < 0.8) & (A_torch[:, None] < 0))
check("クリッピングが効いている", stopped.sum() >= 3,
      f"{mask_12.sum()} トークン中 {stopped.sum()} トークン")

# %%
leaf = new.clone().requires_grad_()
matches = torch.autograd.gradcheck(
    lambda x: grpo_loss(x, old, A_torch, mask_12, 0.2, ref, 0.04), leaf)
check("自動微分の勾配 = 数値微分の勾配", matches)

# %% [markdown]
# 古い方策、参照方策、アドバンテージには勾配が流れません。古い方策に計算グラフの付いた対数確率を渡しても、方策の勾配は打ち消されません。

# %%
leaves = [x.clone().requires_grad_() for x in (new, old, ref, A_torch)]
grpo_loss(*leaves[:2], leaves[3], mask_12, 0.2, leaves[2], 0.04).backward()
check("データには勾配が流れない",
      leaves[0].grad.abs().sum() > 0
      and all(leaf.grad is None for leaf in leaves[1:]))
check("詰め物の勾配は 0", (leaves[0].grad[~mask_12] == 0).all())

# %% [markdown]
# 手計算とも合わせておきましょう。まずアドバンテージです。
# 採点できなかった回答は `None` にします。平均にも標準偏差にも入れず、アドバンテージは 0 です。0 点とは違います。

# %%
claim("[1, 0, 0, 0]", group_advantages([1.0, 0.0, 0.0, 0.0], 4),
      [1.4997, -0.4999, -0.4999, -0.4999], tol=1e-6)
claim("標準偏差で割らない",
      group_advantages([1.0, 0.0, 0.0, 0.0], 4, scale="none"),
      [0.75, -0.25, -0.25, -0.25])
claim("[1, None, 0, 0]", group_advantages([1.0, None, 0.0, 0.0], 4),
      [1.1545, 0, -0.57725, -0.57725], tol=1e-6)
claim("全部同じなら、float32 でもちょうど 0",
      group_advantages([0.1] * 7, 7), 0.0, tol=0.0)

# %% [markdown]
# 次は、 $d=\pm\log2$ のときの $k_3$ と、長さの違う 2 つの回答の損失です。

# %%
log2 = math.log(2)
claim("k3(log 2)、k3(−log 2)、k3(0)",
      kl_k3(torch.zeros(3).double(), double([log2, -log2, 0.0])),
      [0.306853, 0.193147, 0.0], tol=1e-6)

# %%
A_pair, at_zero = double([1.0, -1.0]), torch.zeros(2, 10).double()


def loss_of_lengths(first, second):
    mask = torch.arange(10) < torch.tensor([[first], [second]])
    return grpo_loss(at_zero, at_zero, A_pair, mask, 0.2)


claim("長さ 2 と 8: −(1 − 1)/2", loss_of_lengths(2, 8), 0.0)
claim("長さ 2 と 0: 空の回答は 0 として数える", loss_of_lengths(2, 0), -0.5)
claim("全部が詰め物", loss_of_lengths(0, 0), 0.0)

# %% [markdown]
# 対数確率比が 89 だと、float32 では $e^{89}$ があふれます。サポートページの式をそのまま書くと、勾配は $0\times\infty$ で NaN になります。 `grpo_loss` は、 $A>0$ なら切られた側の値（勾配は 0）を返し、 $A<0$ なら、切られずにあふれる位置を言って止まります。

# %%
one, token = torch.ones(1), torch.ones(1, 1)
huge = torch.tensor([[89.0]], requires_grad=True)
plain = -torch.minimum(huge.exp() * one, huge.exp().clamp(0.8, 1.2) * one)
check("そのまま書くと NaN", gradient_of(plain.sum(), huge).isnan())
loss = grpo_loss(huge, torch.zeros(1, 1), one, token, 0.2)
claim("A = +1 なら −1.2、勾配 0",
      [loss.detach(), gradient_of(loss, huge).squeeze()], [-1.2, 0], 1e-6)


# %%
def error_of(build):
    try:
        build()
    except (ValueError, TypeError, KeyError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "エラーになりません"

# %%
never = torch.tensor([[-1.0, -torch.inf]])
refused = {
    "あふれる": (lambda: grpo_loss(
        huge, torch.zeros(1, 1), -one, token, 0.2), "[0, 0] is 89"),
    "log 0": (lambda: grpo_loss(
        never, never, one, torch.ones(1, 2), 0.2), "logps[0, 1] is -inf"),
    "G = 1": (lambda: group_advantages([1.0, 0.0], 1), "G ≥ 2"),
    "参照方策がない": (lambda: grpo_loss(
        token, token, one, token, 0.2, beta=0.1), "ref_logps is missing"),
}
for name, (build, words) in refused.items():
    message = error_of(build)
    check(name, words in message, message[:72])

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じ回答で、損失と勾配を比べる
#
# 相手は TRL の `GRPOTrainer` そのものです。パッケージの `trl_grpo` は、生成する代わりにこちらの決めた回答を、採点する代わりにこちらの決めた報酬を渡し、その先（アドバンテージ、古い方策と参照方策の対数確率、損失、勾配）は TRL に計算させます。

# %%
from companion.lm import load

ref_model, tokenizer = load("prime-sums", dtype=torch.float64)


def nudged(seed):
    """SFT 済みのモデルの重みを、少し動かしたもの。"""
    lm, _ = load("prime-sums", dtype=torch.float64)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters():
            p += 0.02 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    return lm


model, old_model = nudged(0), nudged(1)

# %% [markdown]
# 問題は 2 つ、回答は 4 つずつです。長さの違う回答、両方の符号のアドバンテージを入れました。
# プロンプトの長さはそろえてあります。長さが違うと、左に詰め物が入り、位置の計算の丸めで 1e-7 ほどずれるからです（「式と TRL の違い」で測ります）。

# %%
ANSWERS = {"20未満の素数の合計は？": ["77", "78", "1290", "7"],
           "30未満の素数の合計は？": ["129", "127", "129", "30129"]}
asked = [x for x in ANSWERS for _ in range(4)]
answered = [y for ys in ANSWERS.values() for y in ys]
scores = [1.0, 0, 0, 0, 1, 0, 1, 0]


# %%
def token_ids(texts, end=""):
    return tokenizer([text + end for text in texts])["input_ids"]


ids = token_ids(asked), token_ids(answered, end=tokenizer.eos_token)


# %%
from companion.oracle import trl_grpo


def trl(rewards=scores, ids=ids, models=(model, old_model, ref_model),
        **config):
    page = dict(loss_type="grpo", importance_sampling_level="token",
                scale_rewards="group", beta=0.0, epsilon=0.2,
                use_bias_correction_kl=False, num_generations=4)
    return trl_grpo(*models, *ids, rewards, tokenizer, **(page | config))


# %% [markdown]
# こちらの計算は、同じモデルから対数確率を求め、 `grpo_loss` に渡すだけです。アドバンテージは TRL のものを使います（TRL は float32 で計算するからです。「式と TRL の違い」で比べます）。

# %%
from companion.lm import token_log_probs


def table_of(lm, batch, temperature=1.0):
    return token_log_probs(lm, **batch, temperature=temperature)


def ours(result, old=old_model, beta=0.0, temperature=1.0):
    """こちらの損失、全パラメータの勾配、NumPy 版の損失。"""
    mask, A = result.batch["completion_mask"], result.advantages
    logps = table_of(model, result.batch, temperature)
    with torch.no_grad():
        data = [table_of(lm, result.batch, temperature)
                for lm in (old, ref_model)]
    loss = grpo_loss(logps, data[0], A, mask, 0.2, data[1], beta)
    names, parameters = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(loss, parameters)
    rows = [[row[m.bool()].numpy() for row, m in zip(x, mask, strict=True)]
            for x in (logps.detach(), *data)]
    numpy_loss = grpo_loss_numpy(*rows, A.double().numpy(), 0.2, beta)
    return loss.item(), dict(zip(names, slopes, strict=True)), numpy_loss


# %% [markdown]
# `num_iterations=2` とすると、TRL は古い方策の対数確率を使います（方策オフ）。既定の 1 では、古い方策が何であっても、比を 1 とみなします（ `steps_per_generation` も既定のままのとき）。

# %%
parity, worst, results = {}, [], {}
cases = {
    "方策オン、β = 0": (dict(), dict(old=model)),
    "方策オン、β = 0.04": (dict(beta=0.04), dict(old=model, beta=0.04)),
    "方策オフ、β = 0": (dict(num_iterations=2), {}),
    "方策オフ、β = 0.04": (dict(num_iterations=2, beta=0.04),
                         dict(beta=0.04)),
    "方策オフ、標準偏差なし": (
        dict(num_iterations=2, scale_rewards="none"), {}),
}
for name, (config, mine) in cases.items():
    theirs = results[name] = trl(**config)
    loss, slopes, by_numpy = ours(theirs, **mine)
    worst.append(max((slopes[n] - theirs.gradients[n]).abs().max().item()
                     for n in slopes))
    parity[name] = by_numpy, loss, theirs.loss.item()

# %%
check("全パラメータの勾配が一致", max(worst) <= 1e-12,
      f"5 通りで最大差 {max(worst):.0e}")
parity = pd.DataFrame(parity, index=["NumPy", "torch", "TRL"]).T
gaps = parity.max(axis=1) - parity.min(axis=1)
check("NumPy = torch = TRL", gaps.max() <= 1e-12, f"最大差 {gaps.max():.0e}")

# %%
parity = parity.map("{:.12f}".format)
parity["最大差"] = gaps.map("{:.0e}".format)
parity["クリップの割合"] = [
    results[name].metrics["clip_ratio/region_mean"] for name in parity.index]
parity.round(3)

# %% [markdown]
# ### サポートページのコードを CPU で動かす
#
# サポートページの例を、ノート PC の CPU で動かします。データは 1 行、報酬は「数字だけの回答が正解と一字一句同じなら 1」です。

# %%
from datasets import Dataset

train_dataset = Dataset.from_list([
    {
        "prompt": "20未満の素数の合計はいくらですか？ "
                  "数字だけで答えてください。",
        "ground_truth": "77",
    },
])


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


# %%
def page_trainer(rows, reward=reward_func, **changes):
    return GRPOTrainer(
        model=str(checkpoint("prime-sums")),  # 変更 1
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),  # 変更 2
            num_generations=4,
            per_device_train_batch_size=4,
            loss_type="grpo",
            importance_sampling_level="token",
            scale_rewards="group",
            beta=0.04,
            epsilon=0.2,
            use_bias_correction_kl=False,
            bf16=torch.cuda.is_available(),  # 変更 3
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,  # 表に出すために、毎回記録します
            **changes,
        ),
        train_dataset=rows,
    )


# %%
first_run = train(page_trainer(train_dataset))
shown = ["step", "loss", "reward", "frac_reward_zero_std", "grad_norm"]
first_run[shown]

# %% [markdown]
# 変えたのは 3 か所で、かならず要るのは 3 つ目だけです（ほかに、何度か使うので関数にまとめ、記録を表にするため `logging_steps` を足し、 `trainer.train()` の代わりにパッケージの `train` を使いました）。
#
# 1. **モデルは、フォルダの場所で渡します。** $\beta\ne0$ のとき、TRL は参照方策を「モデルが読み込まれた場所」から読み直します。 `GRPOTrainer` には `ref_model` という引数がないので、メモリの中で作っただけのモデルは、いったん保存してから渡します。
# 2. **出力先は、一時フォルダにします。**
# 3. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
#
# さて、動きはしましたが、報酬は 0、勾配も 0 です。この小さなモデルは、このとおりの文面の問題を見たことがなく、4 つの回答は一つも当たりません。グループが退化しているので（ `frac_reward_zero_std` が 1）、何も学びません。 **一つも当たらない問題からは、GRPO は学べない** のです。

# %%
check("一つも当たらず、勾配は 0", (first_run["reward"] == 0).all()
      and (first_run["grad_norm"] == 0).all()
      and (first_run["frac_reward_zero_std"] == 1).all())

# %% [markdown]
# SFT で学んだ文面にすれば、当たり始めます。「学習」の節では、100 通りの問題でこれを行います。

# %%
known = Dataset.from_list(
    [{"prompt": "20未満の素数の合計は？", "ground_truth": "77"}])
second_run = train(page_trainer(known, max_steps=6))
second_run[shown]

# %%
moving = second_run[second_run["frac_reward_zero_std"] == 0]
check("当たりと外れの混じったグループでは、勾配が 0 でない",
      len(moving) > 0 and (moving["grad_norm"] > 0).all(),
      f"6 回中 {len(moving)} 回")

# %% [markdown]
# **報酬関数について** 二つ、知っておくとよいことがあります。一つは、一字一句の一致には限界があることです。「77です。」は 0 点になります。
# もう一つは、データに `ground_truth` の列がないと、黙って 0 点にはならず、エラーになることです（パッケージの `exact_match` は、どの列があるかも言います）。

# %%
from companion.rewards import exact_match

claim("一字一句の一致", reward_func(["77", " 77 ", "77です。"], ["77"] * 3),
      [1, 1, 0])
misnamed = Dataset.from_list(
    [{"prompt": "20未満の素数の合計は？", "answer": "77"}])
for reward, words in ((reward_func, "'ground_truth'"),
                      (exact_match, "the columns are ['answer']")):
    message = error_of(
        lambda r=reward: page_trainer(misnamed, reward=r).train())
    check(reward.__name__, words in message, message)

# %% [markdown]
# 変更 1 と 3 をしないと、次のエラーになります。

# %%
from companion.lm import new_model

cpu_only = dict(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False)
memory_error = error_of(lambda: GRPOTrainer(
    new_model(), reward_func, args=GRPOConfig(beta=0.04, **cpu_only),
    processing_class=tokenizer, train_dataset=known))
check("メモリの中のモデル", "OSError" in memory_error,
      memory_error[:60] + "…")
bf16_error = error_of(lambda: GRPOConfig(tempfile.mkdtemp()))
if "bf16" in bf16_error:
    print("bf16 を書かない:", bf16_error[:60] + "…")
else:
    print("SKIPPED: このマシンでは、bf16 を書かなくても動きます")

# %% [markdown]
# ### 式と TRL の違い
#
# 損失の形は、見てきたとおり式と一致します。違いは、式に書かれていないところにあります。一つずつ、数で確かめましょう。
#
# **一度の生成で一度の更新なら、古い方策は今の方策です。** TRL は古い方策の対数確率を計算せず、比を 1 とします。上の表の「方策オン」の行では、別のモデルを古い方策として渡したのに、クリップの割合は 0、損失も 0 でした（1e-9 ほど残るのは、アドバンテージが float32 だからです）。勾配は 0 ではありません。 `num_iterations=2` にすると、クリップが始まります。

# %%
differences = {}
on_policy, off_policy = (
    results[f"{name}、β = 0"] for name in ("方策オン", "方策オフ"))


def norm_of(result):
    return math.sqrt(sum((x**2).sum().item()
                         for x in result.gradients.values()))


found = (f"損失 {abs(on_policy.loss.item()):.0e}、"
         f"勾配のノルム {norm_of(on_policy):.3f}")
check("損失は 0、勾配は 0 でない", abs(on_policy.loss) < 1e-7
      and norm_of(on_policy) > 0.1, found)
differences["一度の更新では比が 1"] = found
clip = [r.metrics["clip_ratio/region_mean"] for r in (on_policy, off_policy)]
found = f"クリップの割合 {clip[0]:.3f}、num_iterations=2 なら {clip[1]:.3f}"
check("num_iterations=2 ならクリップが起きる", clip[0] == 0 < clip[1], found)
differences["クリップ"] = found

# %% [markdown]
# **だから、ε は効きません。** サポートページの例題を 100 問に広げた学習（「学習」で詳しく見ます）を 4 回だけ更新して、 $\epsilon=0.2$ と $10^{-6}$ を比べます。

# %%
from companion.tasks import PRIME_SUMS, problems
from companion.training import preset

grpo_preset = preset("grpo")  # 大きさ、学習率、G など
arithmetic = problems(PRIME_SUMS, grpo_preset.examples, seed=0)


def trainer_for(epsilon=0.2, **changes):
    return GRPOTrainer(
        model=str(checkpoint("prime-sums", grpo_preset.size)),
        reward_funcs=reward_func,
        processing_class=tokenizer,
        train_dataset=arithmetic,
        args=GRPOConfig(
            loss_type="grpo", importance_sampling_level="token",
            scale_rewards="group", beta=grpo_preset.beta, epsilon=epsilon,
            use_bias_correction_kl=False,
            max_completion_length=PRIME_SUMS.max_new_tokens,
            **grpo_preset.arguments(**changes),
        ),
    )


def four_steps(**changes):
    return train(trainer_for(max_steps=4, logging_steps=1, **changes))


# %%
columns = ["loss", "grad_norm", "kl", "clip_ratio/region_mean"]
four = {(n, e): four_steps(num_iterations=n, epsilon=e)[columns]
        for n in (1, 2) for e in (0.2, 1e-6)}
gap = {n: (four[n, 0.2] - four[n, 1e-6]).abs().max().max()
       for n in (1, 2)}

# %%
claim("一度の更新: ε = 0.2 と 1e-6 の記録の差", gap[1], 0.0, tol=1e-6)
check("num_iterations=2 なら違う", gap[2] > 0.01, f"最大差 {gap[2]:.3f}")
clips = four[2, 0.2]["clip_ratio/region_mean"]
check("クリップは 2 回目の更新だけで起きる",
      (clips[::2] == 0).all() and (clips[1::2] > 0).all())
differences["ε を 0.2 から 1e-6 に"] = f"記録の差 {gap[1]:g}"
four[2, 0.2]

# %% [markdown]
# **`use_bias_correction_kl` の既定値は True です。** 方策オンでは比が 1 なので、損失の値は同じです。勾配だけが変わります（ステップ 5・6）。サポートページは False にしています。

# %%
plain = results["方策オン、β = 0.04"]
corrected = trl(beta=0.04, use_bias_correction_kl=True)
claim("損失は同じ", corrected.loss, plain.loss, tol=1e-12)
gap = max((corrected.gradients[n] - plain.gradients[n]).abs().max().item()
          for n in plain.gradients)
check("勾配は違う", gap > 1e-3, f"最大の成分の差 {gap:.4f}")
differences["use_bias_correction_kl"] = f"損失の差 0、勾配の差 {gap:.4f}"

# %% [markdown]
# その勾配も、ステップ 6 で書いた `corrected_loss` と一致します。

# %%
logps = table_of(model, corrected.batch)
with torch.no_grad():
    ref_logps = table_of(ref_model, corrected.batch)
loss = corrected_loss(logps, corrected.advantages,
                      corrected.batch["completion_mask"], ref_logps, 0.04)
names, parameters = zip(*model.named_parameters(), strict=True)
mine = torch.autograd.grad(loss, parameters)
gap = max((slope - corrected.gradients[n]).abs().max().item()
          for n, slope in zip(names, mine, strict=True))
check("比つきの k3 も、こちらの式と一致", gap <= 1e-12, f"最大差 {gap:.0e}")

# %% [markdown]
# **記録される `kl` は、トークン全体の平均です。** 損失の中の KL は、回答の中で平均してから回答で平均したもの（ $1/|y_i|$ ）なので、長さがまちまちなら、方策オンでも「損失 = $\beta\times$ `kl` 」にはなりません。

# %%
k3 = kl_k3(logps, ref_logps).detach()
sizes = plain.batch["completion_mask"].sum(-1)
claim("損失 = β × 回答ごとの平均の平均", plain.loss,
      0.04 * (k3.sum(-1) / sizes).mean(), tol=1e-8)
claim("記録される kl = トークン全体の平均", plain.metrics["kl"],
      k3.sum() / sizes.sum(), tol=1e-6)
found = f"損失/β = {plain.loss / 0.04:.4f}、kl = {plain.metrics['kl']:.4f}"
check("二つは違う", abs(plain.loss / 0.04 - plain.metrics["kl"]) > 1e-3,
      found)
differences["記録される kl"] = found

# %% [markdown]
# **アドバンテージは、モデルが float64 でも float32 です。** 標準偏差は $G-1$ で割り、1e-4 を足します（ $G$ で割る教科書もあります）。丸めの範囲で、こちらの `group_advantages` と同じです。採点できなかった回答（ `None` ）の扱いも同じです。

# %%
with_none = [1.0, None, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
for r, scale in ((scores, "group"), (scores, "none"),
                 (with_none, "group")):
    theirs = trl(rewards=r, scale_rewards=scale).advantages
    claim(f"アドバンテージ（{scale}）: こちら = TRL",
          group_advantages(r, 4, scale), theirs, tol=1e-6)
float32 = results["方策オン、β = 0"].advantages
gap = (group_advantages(double(scores), 4) - float32).abs().max()
check("float32 の丸めの大きさ", 0 < gap < 1e-6, f"{gap:.0e}")
differences["[1, 0, 0, 0] のアドバンテージ"] = (
    f"{float32[0]:.4f}（G で割る標準偏差なら "
    f"{0.75 / np.std([1, 0, 0, 0]):.4f}）、丸め {gap:.0e}")

# %% [markdown]
# **温度は、対数確率にも掛かります。** 生成の温度が $T\ne1$ なら、TRL は方策、古い方策、参照方策のすべてで、ロジットを $T$ で割ってから対数確率を計算します。ですから、最初の更新では、比はちょうど 1、KL は 0 です。

# %%
cold = trl(temperature=0.6, beta=0.04, num_iterations=2,
           models=(ref_model, ref_model, ref_model))
check("T = 0.6 でも、更新前はクリップ 0、KL 0",
      cold.metrics["clip_ratio/region_mean"] == 0
      and abs(cold.metrics["kl"]) < 1e-12)
warm = trl(temperature=0.6, beta=0.04, num_iterations=2)
loss, slopes, _ = ours(warm, beta=0.04, temperature=0.6)
claim("T = 0.6 の損失: こちら = TRL", loss, warm.loss, tol=1e-12)
means = [table_of(model, warm.batch, T).sum() / sizes.sum()
         for T in (1.0, 0.6)]
differences["対数確率の平均、T = 1 と 0.6"] = (
    f"{means[0].item():.3f} と {means[1].item():.3f}")

# %% [markdown]
# **打ち切られた回答も、既定では損失に入ります。** `mask_truncated_completions=True` にすると、損失からは外れますが、報酬はグループの平均に入ったままです。2 つ目の回答から EOS を取って、確かめます。

# %%
cut_ids = ids[0], [y[:-1] if i == 1 else y for i, y in enumerate(ids[1])]
kept, masked = (trl(ids=cut_ids, mask_truncated_completions=flag)
                for flag in (False, True))
counts = [int(r.batch["completion_mask"][1].sum()) for r in (kept, masked)]
found = f"損失に入るトークン {counts[0]} → {counts[1]}"
check("損失からは外れる", counts == [2, 0], found)
claim("アドバンテージは変わらない", masked.advantages, kept.advantages)
differences["mask_truncated_completions"] = found

# %% [markdown]
# **位置は、左の詰め物から数えます。** 長さの違うプロンプトを一つのバッチに入れると、短いほうの位置がずれます。相対位置しか使わないモデル（回転位置埋め込み、RoPE）なので値は同じはずですが、回転の角度が float32 で計算されるので、float64 のモデルでも、対数確率がわずかに動きます。

# %%
uneven = [x.replace("20", "5") for x in asked]
shifted = trl(ids=(token_ids(uneven), ids[1]), num_iterations=2)
loss, _, _ = ours(shifted)
gap = abs(loss - shifted.loss.item())
check("詰め物があると、1e-12 では一致しない", 1e-12 < gap < 1e-5,
      f"{gap:.0e}")
differences["長さの違うプロンプト"] = f"損失の差 {gap:.0e}"

# %% [markdown]
# 最後に、既定値を並べます。既定の損失は GRPO ではなく DAPO で、KL はありません。ドロップアウトは止まりません。学習率も、この小さなモデルには小さすぎます。

# %%
defaults = GRPOConfig(**cpu_only)
for name in ("loss_type", "beta", "num_generations", "epsilon",
             "num_iterations", "temperature", "max_completion_length",
             "scale_rewards", "disable_dropout", "learning_rate"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# サポートページの例題を、100 通りに広げて学習させます。「 $n$ 未満の素数の合計は？」（ $n=3,\dots,102$ ）です。報酬関数もスイッチもサポートページのまま、大きさ、学習率、 $G$ はパッケージの表（プリセット）から取ります。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。100 問の答えを **丸暗記して** いて、学習とテストの区別はありません。素数の足し算を身につけるのではなく、「知っている」答えを選ぶ確率を上げる学習です。

# %%
from dataclasses import asdict

pd.DataFrame([asdict(grpo_preset)])

# %%
trainer = trainer_for()
sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty",
            "max_completion_length", "num_generations")
{name: getattr(trainer.args, name) for name in sampling}

# %% [markdown]
# これが、生成に使われる設定です。温度 1 で、語彙の全部から引いています。CPU のプリセットでは、一度に 128 個、つまり 16 問 × 8 個の回答を生成し、一度だけ更新します。

# %%
history = train(trainer)
trained_model = trainer.model

# %%
from companion.plots import curves

curves(history, {
    "報酬の平均": "reward",
    "報酬の標準偏差（バッチ全体）": "reward_std",
    "退化したグループの割合": "frac_reward_zero_std",
    "KL の推定値（nat/トークン）": "kl",
    "エントロピー（nat/トークン）": "entropy",
    "回答の長さ（トークン）": "completions/mean_length",
    "打ち切られた回答の割合": "completions/clipped_ratio",
    "勾配のノルム": "grad_norm",
    "損失": "loss",
})

# %% [markdown]
# 報酬は上がり、エントロピーは下がり、参照方策から離れていきます。正解が増えるにつれて全問正解のグループが増え、退化したグループの割合が上がります。長さはほとんど変わらず、打ち切られる回答もありません。
# 損失は 0 のまわりの小さな数で、 **学習の進み具合を何も語っていません**。わずかに 0 より大きいのは、 $\beta$ を掛けた KL の分です。
# 種を変えると曲線も変わるので、一度の学習から「この設定のほうが良い」とは言えません。多くの種での比較は「実験」で行います。

# %%
rise = history["reward"].iloc[-1] - history["reward"].iloc[0]
check("報酬が 0.3 以上あがる", rise > 0.3, f"+{rise:.3f}")
rest = (history["loss"] - grpo_preset.beta * history["kl"]).abs().max()
check("損失は、ほぼ β × KL", rest < 0.003,
      f"損失は {history['loss'].max():.4f} 以下、差は {rest:.4f} 以下")
claim("はじめの KL は 0", history["kl"].iloc[0], 0.0, tol=1e-6)
degenerate = history["frac_reward_zero_std"]
check("退化したグループが増える", degenerate.iloc[-1] > 0.15,
      f"{degenerate.iloc[0]:.2f} → {degenerate.iloc[-1]:.2f}")
check("打ち切りはほとんどない",
      history["completions/clipped_ratio"].max() < 0.02)

# %% [markdown]
# 学習の前後を比べます。正解は一通りなので、問題ごとの正解率 $p(x)$ は、サンプリングしなくても、正解の対数確率から正確に計算できます。

# %%
from companion.lm import completion_batch, measure, sequence_log_probs

sft_model, _ = load("prime-sums", grpo_preset.size)
prompts = PRIME_SUMS.test_prompts
rows = completion_batch(tokenizer, prompts,
                        [PRIME_SUMS.answer(x) for x in prompts])


# %%
def right_probability(lm):
    """問題ごとの、正解を書く確率 (100,)。"""
    with torch.no_grad():
        logps = sequence_log_probs(
            lm, **{name: x.to(lm.device) for name, x in rows.items()})
    return logps.exp().double().cpu()


p_before, p_after = map(right_probability, (sft_model, trained_model))

# %%
from companion.plots import before_after

before, after = (measure(lm, tokenizer, PRIME_SUMS, prompts)
                 for lm in (sft_model, trained_model))

# %%
before_after({
    "サンプリング（正確な値）": (p_before.mean(), p_after.mean()),
    "サンプリング（4 回ずつ）": (before["sampled"], after["sampled"]),
    "貪欲法": (before["greedy"], after["greedy"]),
}, limits=(0, 1), title="正解率")

# %%
check("正確な正解率が 0.35 以上あがる",
      p_after.mean() - p_before.mean() > 0.35,
      f"{p_before.mean():.3f} → {p_after.mean():.3f}")
check("サンプリングした正解率は、正確な値に近い",
      abs(before["sampled"] - p_before.mean()) < 0.07
      and abs(after["sampled"] - p_after.mean()) < 0.07)
check("貪欲法の正解率は 0.9 以上", after["greedy"] > 0.9,
      f"{before['greedy']:.2f} → {after['greedy']:.2f}")

# %%
from companion.lm import generate

eight_prompts = prompts[7:100:12]
samples = pd.DataFrame({"プロンプト": eight_prompts})
for name, lm in (("学習前", sft_model), ("学習後", trained_model)):
    ys = generate(lm, tokenizer, eight_prompts, max_new_tokens=8,
                  temperature=1.0)
    samples[name] = [
        f"{y} {'○' if y == PRIME_SUMS.answer(x) else '×'}"
        for x, y in zip(eight_prompts, ys, strict=True)
    ]
samples

# %% [markdown]
# ## 実験
#
# もう一度「全部を数え上げられる世界」に戻ります。方策は表形式、損失は TRL と一致すると確かめた `grpo_loss` です。どちらの実験でも 8 つの乱数の種（シード）を使い、図では線が中央値、帯が最小値から最大値までです。
#
# ### 実験 1：KL の入れ方で、行き先が変わる
#
# ステップ 6 の行き先は、勾配の期待値が 0 になる点でした。グループをサンプリングする学習でも、本当にそこへ着くでしょうか。
# 8 つの世界（参照方策も報酬も別々）で、1 トークンの回答と 2 文字の回答を、KL の入れ方を変えて学習します。標準偏差では割りません。損失に入れるときの係数は $\beta(1-1/G)$ とし、 $\beta'$ を $\beta=0.5$ にそろえます。どの方法でも、目指す $\pi^*$ は同じになります。

# %%
from companion.exact import sample

SEEDS, GROUPS, BETA, STEPS = 8, 32, 0.5, 400


def losses_by_method(G):
    """KL の入れ方 → (log π, log π_ref, 報酬, マスク) の損失。"""
    beta_loss = BETA * (1 - 1 / G)

    def page(logps, ref_logps, r, mask):
        A = group_advantages(r, G, scale="none")
        return grpo_loss(logps, logps, A, mask, 0.2, ref_logps, beta_loss)

    def with_ratio(logps, ref_logps, r, mask):
        A = group_advantages(r, G, scale="none")
        return corrected_loss(logps, A, mask, ref_logps, beta_loss)

    def in_reward(logps, ref_logps, r, mask):
        k1 = ((logps.detach() - ref_logps) * mask).sum(-1)
        A = group_advantages(r - BETA * k1, G, scale="none")
        return grpo_loss(logps, logps, A, mask, 0.2)

    return {"k3 をそのまま損失に": page,
            "比つきの k3 を損失に": with_ratio, "k1 を報酬に": in_reward}


# %%
def run(world, ref_logits, rewards, loss_of, G=4, seed=0):
    """全シードを一度に学習し、途中の log π (更新回数, S, X, Y) を返す。"""
    g = torch.Generator().manual_seed(seed)
    ref_table = world.token_log_probs(ref_logits)
    theta = ref_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    trace = []
    for _ in range(STEPS + 1):
        table = world.token_log_probs(theta)  # (S, X, Y, T)
        trace.append(table.detach().sum(-1))
        y = sample(trace[-1].exp(), GROUPS * G, g)  # (S, X, 個数)
        picked = [t.gather(-2, y[..., None].expand(*y.shape, t.shape[-1]))
                  .flatten(0, -2) for t in (table, ref_table)]
        loss = loss_of(*picked, rewards.gather(-1, y).flatten(),
                       world.mask[y.flatten()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cosine.step()
    return torch.stack(trace)


# %%
g = torch.Generator().manual_seed(3)
one_world, two_world = (World(prompts=2, letters=3, max_length=n)
                        for n in (1, 2))
setting = {}
for title, w in (("1 トークン", one_world), ("2 文字", two_world)):
    ref_logits = w.random_logits(g, SEEDS)
    if w is two_world:
        ref_logits[..., -1] = -torch.inf
    setting[title] = w, ref_logits, w.random_rewards(g, SEEDS)

runs = {(title, name): run(*world_, loss_of)
        for title, world_ in setting.items()
        for name, loss_of in losses_by_method(4).items()}


# %%
def at_beta(ref_logps, q):
    return listing_point(ref_logps, q, BETA)


goals = {}
for title, (w, ref_logits, r) in setting.items():
    ref_logps = w.log_probs(ref_logits)
    page_goal = (at_beta(ref_logps, r) if w is one_world
                 else letter_by_letter(at_beta, ref_logits, r))
    goals[title] = {"π*": tilt(ref_logps, r / BETA),
                    "そのままの k3 の行き先": page_goal}


def distance(title, name, goal):
    """シードごとの KL(π‖行き先)、プロンプトの平均 (S, 更新回数)。"""
    return kl(runs[title, name], goals[title][goal]).mean(-1).T


# %%
from companion.plots import spread

TINTS = dict(zip(losses_by_method(4),
                 (COLOURS[1], COLOURS[3], COLOURS[0]), strict=True))
drawn, axes = figure(2, 2, panel=(4.9, 2.9))
for row, title in zip(axes, setting, strict=True):
    for ax, goal in zip(row, goals[title], strict=True):
        for name, colour in TINTS.items():
            spread(range(STEPS + 1), distance(title, name, goal), ax=ax,
                   colour=colour, yscale="log")
        ax.set(title=f"{title}：{goal}までの距離", xlabel="更新回数",
               ylabel="KL（nat）", ylim=(1e-5, 5))
lines = [axes[0, 0].plot([], [], color=c, label=n)[0]
         for n, c in TINTS.items()]
drawn.legend(handles=lines, loc="outside lower center", ncols=3)
drawn

# %%
ends = pd.DataFrame({
    (title, f"{goal}まで"): {
        name: distance(title, name, goal)[:, -1].quantile(0.5).item()
        for name in losses_by_method(4)}
    for title in setting for goal in goals[title]})
ends.map("{:.4f}".format)


# %%
def end(title, name, goal="π*"):
    return distance(title, name, goal)[:, -1]


page, with_ratio, in_reward = losses_by_method(4)
for title in setting:
    stuck, free = end(title, page), end(title, in_reward)
    check(f"{title}: 8 シードすべてで、k1 を報酬に入れるほうが π* に近い",
          (free < stuck / 3).all(),
          f"{free.max():.4f} 以下と {stuck.min():.3f} 以上")
    there = end(title, page, "そのままの k3 の行き先")
    check(f"{title}: k3 をそのまま入れると、ステップ 6 で解いた点に着く",
          there.max() < 0.01, f"{there.max():.4f} 以下")

# %%
check("1 トークンなら、比つきの k3 も π* に着く",
      end("1 トークン", with_ratio).max() < 0.01,
      f"{end('1 トークン', with_ratio).max():.4f} 以下")
short, long = end("2 文字", in_reward), end("2 文字", with_ratio)
check("2 文字では、比つきの k3 は、8 シードすべてで k1 より遠い",
      (long > 2 * short).all(), f"中央値 {long.quantile(0.5):.4f} と "
      f"{short.quantile(0.5):.4f}")

# %%
w, ref_logits, r = setting["2 文字"]
own_goal = letter_by_letter(
    lambda ref, q: (ref + q / BETA).log_softmax(-1), ref_logits, r)
own = kl(runs["2 文字", with_ratio][-1], own_goal).mean(-1)
check("2 文字の比つきの k3 は、ステップ 6 の自分の行き先に着いている",
      own.max() < 0.01, f"{own.max():.4f} 以下")

# %% [markdown]
# $k_3$ をそのまま損失に入れると、 $\pi^*$ には近づかず、ステップ 6 で解いた $\beta\pi_{\mathrm{ref}}/(\lambda-r)$ （2 文字では、接頭辞ごとにその形）に着きました。1 トークンなら、比を掛けるだけで $\pi^*$ に着きます。2 文字では、比を掛けても届かず、KL を報酬に入れたときだけ着きます。
# KL を報酬に入れた線だけが滑らかなのは、 $\pi^*$ に近づくほどアドバンテージが 0 に近づき（ステップ 6）、サンプリングの雑音も小さくなるからと考えられます。
# 世界（参照方策と報酬）がシードごとに違うので、距離には幅がありますが、上の比較はどのシードでも成り立ちました。
#
# ### 実験 2：標準偏差で割ると、どの問題が重くなるか
#
# ステップ 2 の $w_G(p)$ を描きます。 $p=1/2$ を 1 としました。

# %%
drawn, (axes,) = figure(1, 2, panel=(4.6, 3.0))
sizes_of_G = (2, 4, 8, 16, 64)
for colour, n in zip((GREY, *COLOURS), sizes_of_G, strict=False):
    axes[0].plot(grid, prompt_weight(n, grid) / prompt_weight(n, 0.5),
                 color=colour, label=f"G = {n}")
    axes[1].plot(grid, grid**n + (1 - grid) ** n, color=colour)
axes[0].plot(grid, 0.5 * (grid * (1 - grid)) ** -0.5, color=GREY,
             linestyle=":", label="G → ∞")
axes[0].set(title="問題の重み（p = 1/2 を 1 として）", ylim=(0, 4.2))
axes[1].set(title="退化したグループの割合", ylim=(0, 1))
for ax in axes:
    ax.set(xlabel="正解率 p", xlim=(0, 1))
axes[0].legend(loc="upper center", ncols=2)
drawn

# %% [markdown]
# 重みが大きいとは、退化しなかったグループが強く押されるということです。難しい問題（ $p$ が 0 に近い）では、右の図のとおり、ほとんどのグループが退化していて、残ったわずかなグループを大きく数えます。その二つを合わせたのが左の図です。
#
# サンプリングでも確かめます。難しい問題（ $p=.05$ ）と中くらいの問題（ $p=.5$ ）で、勾配を $\nabla p$ で割った値を、シードごとに 4,000 グループから見積もります。

# %%
def estimated_weight(p, scale, G=8, groups=4000):
    """サンプルから見積もった、∇p に掛かる重み。シードごとに (S,)。"""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(SEEDS):
        right = (torch.rand(groups * G, generator=g) < p).double()
        score = right - p  # ロジットについての ∇log π
        A = group_advantages(right, G, scale)
        found.append((A * score).mean() / (p * (1 - p)))
    return torch.stack(found)


weights = {(p, scale): estimated_weight(p, scale)
           for p in (0.05, 0.5) for scale in ("group", "none")}
ratios = {scale: weights[0.05, scale] / weights[0.5, scale]
          for scale in ("group", "none")}
for scale, expected in (("group", more[8]), ("none", 1.0)):
    mean = ratios[scale].mean().item()
    check(f"{scale}: 難しい問題は、中くらいの問題の {expected:.2f} 倍",
          abs(mean - expected) < 0.04,
          f"平均 {mean:.2f}（{ratios[scale].min():.2f}〜"
          f"{ratios[scale].max():.2f}）")

# %% [markdown]
# ただし、大きな差になるのは、 $G$ が大きく、正解率が問題によって大きく違うときです。さきほどの言語モデルでは、どうだったでしょうか。学習前の $p(x)$ から、100 問の重みを計算します。

# %%
eight_weights = prompt_weight(8, p_before) / prompt_weight(8, 0.5)
low, high = p_before.aminmax()
check("言語モデルの 100 問の重みは、ほとんど同じ", eight_weights.max() < 1.3,
      f"p(x) は {low:.2f}〜{high:.2f}、"
      f"重みは 1〜{eight_weights.max():.2f} 倍")

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/5.3.1-grpo.ipynb](exercises/5.3.1-grpo.ipynb) で、アドバンテージと損失を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **正解率の違う問題** 「実験 2」の $p=.05$ を $.01$ に変えると、 $G=8$ での重みの比と、退化したグループの割合はいくつになるでしょうか。予想してから確かめてください。
# 3. **2 回目の更新** 「学習」の設定に `num_iterations=4` を足し、学習率を 2e-4 に下げてください。クリップの割合、KL、報酬の曲線はどう変わるでしょうか。 $\epsilon$ を変えると、今度は何かが変わるでしょうか。
# 4. **行き先** 「実験 1」の損失を、標準偏差で割る形（`scale="group"`）に変えてください。 $k_3$ をそのまま入れると、1 トークンでは、ステップ 6 と同じやり方で解いた「三つ目の点」に着くでしょうか。 $k_1$ を報酬に入れる形では、 $\pi^*$ の近くで何が起きるでしょうか。
# 5. **逆向きの KL** 1 トークンの世界で、報酬が極端に低い回答（ $r=-10$ ）を一つ作り、 $\pi^*$ とサポートページの行き先で、その確率を比べてください。

# %% [markdown]
# ## 参考文献
#
# - Shao ほか. DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. 2024. [arXiv:2402.03300](https://arxiv.org/abs/2402.03300) GRPO の論文です。
# - Schulman. Approximating KL Divergence. 2020. [joschu.net/blog/kl-approx.html](http://joschu.net/blog/kl-approx.html) 推定量 $k_1,\ k_2,\ k_3$ の出典です。
# - Williams. Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning. Machine Learning 8, 1992. REINFORCE の論文です。
# - Ahmadian ほか. Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs. 2024. [arXiv:2402.14740](https://arxiv.org/abs/2402.14740) KL を報酬に入れる RLOO を、言語モデルで調べました。
# - Liu ほか. Understanding R1-Zero-Like Training: A Critical Perspective. 2025. [arXiv:2503.20783](https://arxiv.org/abs/2503.20783) 標準偏差と $1/|y_i|$ を外した Dr. GRPO の論文です（5.3.2 節）。
# - Yu ほか. DAPO: An Open-Source LLM Reinforcement Learning System at Scale. 2025. [arXiv:2503.14476](https://arxiv.org/abs/2503.14476) 退化したグループを取り除く動的サンプリングを提案しました（5.3.3 節）。
# - TRL 1.12.0 `GRPOTrainer`（`trl/trainer/grpo_trainer.py`）。
