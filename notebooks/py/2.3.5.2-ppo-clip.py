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
# # 2.3.5.2 方策勾配から PPO のクリッピングまで
#
# 本書 2.3.5.2 節の式 (2.29) を扱います。
#
# 「報酬の期待値を、方策のパラメータで微分する」という一行から始めて、REINFORCE、将来の報酬だけを足す工夫、ベースライン、アドバンテージ、TD 誤差、GAE を一つずつ通り、PPO（proximal policy optimization）の式 (2.29) までの道を、全部歩きます。
# どの一歩も、すべての軌跡を数え上げられる小さな世界で実行し、等式の両辺を計算して比べます。分散が「減るはず」のところで増える例や、クリッピングが守ってくれない例も、数で見ます。
# それから、NumPy で書いた REINFORCE と PPO が 4×4 のマス目を解くようすを見ます。言語モデルの PPO は、4.4.3 節のノートブックで扱います。
#
# 準備のしかたは [README](../README.md) に、実行時間の実測値は [RUNTIMES.md](../RUNTIMES.md) にあります。 `companion` は、このノートブックのための小さなパッケージです。
# `claim` は等式の両辺を計算して比べ（許容差は、断りがなければ 1e-10）、 `check` は条件を確かめます。成り立たなければ、そこでエラーになって止まります。

# %%
import math
from dataclasses import dataclass
from itertools import product

import torch

from companion.notebook import check, claim, setup

setup()

# %% [markdown]
# ## 記号
#
# | 記号 | 変数 | 形状 | TRL での名前 |
# |---|---|---|---|
# | $\tau=(s_0,a_0,r_0,s_1,\dots)$ （軌跡） | `states`, `actions` | (N, T) | `query_responses` |
# | $r_t$ （ $s_t$ で $a_t$ を選んだ直後の報酬） | `rewards` | (N, T) | `rewards` |
# | $R(\tau)=\sum_tr_t$ （収益） | `total` | (N, 1) | – |
# | $R_t=\sum_{t'\ge t}r_{t'}$ （時刻 $t$ からの報酬の和） | `to_go` | (N, T) | – |
# | $J(\theta)$ （収益の期待値） | `J` | – | – |
# | $V^\pi(s),\ Q^\pi(s,a),\ A^\pi(s,a)$ （真の価値、行動価値、アドバンテージ） | `V`, `Q`, `A` | (S,)、(S, A) | – |
# | $V(s)$ （価値モデルの出力。真の価値とは限らない） | `values` | (N, T) | `values`, `vpred` |
# | $\delta_t$ （TD 誤差） | `deltas` | (N, T) | `delta` |
# | $\gamma,\ \lambda$ （割引率、GAE の係数） | `gamma`, `lam` | – | 同じ |
# | $\widehat A_t$ （アドバンテージの推定） | `advantages` | (N, T) | `advantages` |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}}$ （行動の対数確率） | `logps`, `old_logps` | (N, T) | `new_logprobs`, `logprobs` |
# | $w_t(\theta)$ （重要度比） | `ratio`, `w` | (N, T) | `ratio` |
# | $\epsilon$ （クリッピングの幅） | `epsilon` | – | `cliprange` |
#
# N は軌跡の数、T はいちばん長い軌跡の歩数です。短い軌跡は右に詰め物をし、 `mask` を 0 にします。形状の S は状態の数、A は行動の数です。

# %% [markdown]
# ## 導出
#
# ### 二つの小さな世界
#
# 一つめは **廊下** です。5 つのマスの真ん中から始め、左右どちらかへ一歩ずつ動きます。床が滑るので、2 割は逆へ進みます。両端に着くか、4 歩で終わりです。
#
# | マス | 0（穴） | 1 | 2（出発） | 3（水たまり） | 4（宝） |
# |---|---|---|---|---|---|
# | 入ったときの報酬 | −1 | 0 | 0 | −0.3 | +1 |
#
# 残りの歩数によって先の見込みが変わるので、状態 $s_t$ は「何歩目か」と「どのマスか」の組とします。
#
# 二つめは **言葉** です。状態は「それまでに書いた文字列」（接頭辞）、行動は次のトークン（ a か b か EOS）で、最長 3 トークンです。言語モデルと同じ形で、次の状態は行動だけで決まります。報酬は、接頭辞とトークンの組ごとに乱数で決めておきます。
#
# どちらの世界でも、すべての軌跡を数え上げて表にします。方策は、状態ごとに行動のロジットを並べた表 $\theta$ （形状は (S, A)）です（表形式の方策）。

# %%
def double(values):
    return torch.tensor(values, dtype=torch.float64)


# %%
@dataclass
class Paths:
    """ある世界のすべての軌跡。"""

    states: torch.Tensor  # (N, T) 状態の番号
    actions: torch.Tensor  # (N, T) 行動の番号
    rewards: torch.Tensor  # (N, T)
    mask: torch.Tensor  # (N, T)
    env: torch.Tensor  # (N,) 環境の側の確率 Π P(s_{t+1}|s_t, a_t)
    P: torch.Tensor  # (S, A, S) 次の状態へ移る確率（終わる分は含まない）
    r: torch.Tensor  # (S, A) 直後の報酬の期待値

    def logps(self, theta):
        table = theta.log_softmax(-1)[self.states, self.actions]
        return torch.where(self.mask, table, 0.0)

    def chance(self, theta):
        """軌跡の確率 p_θ(τ)。(N,)"""
        return self.env * self.logps(theta).sum(-1).exp()


# %%
ENTER = (-1.0, 0.0, 0.0, -0.3, 1.0)  # マスに入ったときの報酬
SLIP, LIMIT = 0.2, 4


# %%
def moves(action):
    """（確率、進む向き）の組。行動 0 は左、1 は右。"""
    wanted = 1 if action == 1 else -1
    return (1 - SLIP, wanted), (SLIP, -wanted)


# %%
def walks(cell=2, t=0):
    """（環境の確率、[(状態, 行動, 報酬), …]）を、すべての軌跡について。"""
    if cell in (0, 4) or t == LIMIT:
        yield 1.0, []
        return
    for action in (0, 1):
        for p, move in moves(action):
            now = 5 * t + cell, action, ENTER[cell + move]
            for rest_p, rest in walks(cell + move, t + 1):
                yield p * rest_p, [now, *rest]


# %%
def corridor():
    env, found = zip(*walks(), strict=True)
    lengths = torch.tensor([len(path) for path in found])
    filler = (0, 0, 0.0)
    table = double([path + [filler] * (LIMIT - len(path)) for path in found])
    P, r = torch.zeros(20, 2, 20).double(), torch.zeros(20, 2).double()
    for t, cell, action in product(range(LIMIT), (1, 2, 3), (0, 1)):
        s = 5 * t + cell
        for p, move in moves(action):
            r[s, action] += p * ENTER[cell + move]
            if t + 1 < LIMIT and cell + move not in (0, 4):
                P[s, action, s + 5 + move] = p
    return Paths(table[..., 0].long(), table[..., 1].long(), table[..., 2],
                 torch.arange(LIMIT) < lengths[:, None], double(env), P, r)


# %%
from companion.exact import World


def language(generator):
    world = World(prompts=1, letters=2, max_length=3)
    r = torch.randn(world.num_prefixes, 3, generator=generator).double()
    P = torch.zeros(7, 3, 7).double()
    goes_on = world.mask[:, 1:]
    P[world.prefixes[:, :-1][goes_on], world.tokens[:, :-1][goes_on],
      world.prefixes[:, 1:][goes_on]] = 1.0
    rewards = torch.where(world.mask, r[world.prefixes, world.tokens], 0.0)
    env = torch.ones(len(world.responses)).double()
    return Paths(world.prefixes, world.tokens, rewards, world.mask, env, P, r)


# %%
g = torch.Generator().manual_seed(0)
worlds = {"廊下": corridor(), "言葉": language(g)}
thetas = {name: torch.randn(world.r.shape, generator=g).double()
          for name, world in worlds.items()}
for name, world in worlds.items():
    lengths = world.mask.sum(-1)
    print(f"{name}: 軌跡 {len(lengths)} 本、長さ {lengths.unique().tolist()}")

# %% [markdown]
# ### ステップ 1：軌跡の確率と、収益の期待値
#
# 方策 $\pi_\theta$ に従って歩いたとき、軌跡 $\tau$ が出る確率は、方策の分と環境の分の積です。
#
# $$
# p_\theta(\tau)=\prod_t\pi_\theta(a_t\mid s_t)\,P(s_{t+1}\mid s_t,a_t),\qquad
# J(\theta)=\mathbb{E}_{\tau\sim p_\theta}[R(\tau)]=\sum_\tau p_\theta(\tau)R(\tau)
# $$
#
# （出発点は決まっています。）最大にしたいのは、この $J$ です。割引率は、断りがなければ $\gamma=1$ とします。
#
# $J$ は、軌跡を数え上げなくても、 **ベルマン方程式** $V^\pi(s)=\sum_a\pi(a\mid s)\bigl[r(s,a)+\gamma\sum_{s'}P(s'\mid s,a)V^\pi(s')\bigr]$ を解いて求められます。ここで $r(s,a)$ は直後の報酬の期待値です。二つの計算は、まったく別のものです。

# %%
def solve(world, theta, gamma=1.0):
    """ベルマン方程式を解いて、V^π (S,) と Q^π (S, A) を返す。"""
    pi = theta.softmax(-1)
    P_pi = (pi[..., None] * world.P).sum(1)
    eye = torch.eye(len(pi)).double()
    V = torch.linalg.solve(eye - gamma * P_pi, (pi * world.r).sum(-1))
    return V, world.r + gamma * world.P @ V


# %%
for name, world in worlds.items():
    theta, start = thetas[name], world.states[0, 0]
    p = world.chance(theta)
    claim(f"{name}: 確率の和は 1", p.sum(), 1.0)
    J = (p * world.rewards.sum(-1)).sum()
    claim(f"{name}: 数え上げた J = ベルマン方程式の J", J,
          solve(world, theta)[0][start])

# %% [markdown]
# ### ステップ 2：対数微分
#
# $J$ を $\theta$ で微分します。 $\nabla p=p\,\nabla\log p$ なので
#
# $$
# \nabla J=\sum_\tau R(\tau)\,\nabla p_\theta(\tau)=\mathbb{E}_{\tau\sim p_\theta}\bigl[R(\tau)\,\nabla\log p_\theta(\tau)\bigr]
# $$
#
# と、また **期待値の形** になります。しかも、対数をとると積が和になり、環境の確率 $P$ は $\theta$ によらないので微分で消えます。
#
# $$
# \nabla\log p_\theta(\tau)=\sum_t\nabla\log\pi_\theta(a_t\mid s_t)
# $$
#
# 環境のしくみを知らなくても、歩いてみるだけで勾配が見積もれるのは、このためです。
# 表形式の方策では、 $\nabla\log\pi_\theta(a\mid s)$ （スコア）を手で書けます。ロジットの表の $s$ の行だけが 0 でなく、そこは「選んだ行動で 1、ほかは 0」から $\pi_\theta(\cdot\mid s)$ を引いたものです。

# %%
from torch.nn.functional import one_hot


def scores_of(world, theta):
    """∇log π(a_t|s_t) を手で書いたもの。(N, T, S, A)、詰め物では 0。"""
    pi = theta.softmax(-1)
    row = one_hot(world.states, pi.shape[0]) * world.mask[..., None]
    taken = one_hot(world.actions, pi.shape[1]) - pi[world.states]
    return row[..., None] * taken[..., None, :]


# %%
for name, world in worlds.items():
    leaf = thetas[name].clone().requires_grad_()
    log_p = world.chance(leaf)[7].log()  # 環境の確率も入っている
    (by_autograd,) = torch.autograd.grad(log_p, leaf)
    claim(f"{name}: ∇log p(τ) = Σ_t ∇log π", by_autograd,
          scores_of(world, thetas[name])[7].sum(0))

# %% [markdown]
# **主張** $\nabla J=\mathbb{E}[R(\tau)\sum_t\nabla\log\pi_\theta(a_t\mid s_t)]$ です。左辺はベルマン方程式の解を自動微分したもの、右辺は手で書いたスコアを数え上げたものです。
# これから出てくる推定量は、どれも $\sum_t\nabla\log\pi_\theta(a_t\mid s_t)\times$ （重み） の形なので、軌跡ごとの値とその期待値、分散（全成分の分散の和）を計算する関数を作っておきます。

# %%
def estimates(world, theta, weights):
    """軌跡ごとの Σ_t ∇log π(a_t|s_t)·重み_t。(N, S, A)"""
    weights = weights.expand_as(world.rewards)[..., None, None]
    return (scores_of(world, theta) * weights).sum(1)


# %%
def mean_and_variance(world, theta, weights):
    p, values = world.chance(theta), estimates(world, theta, weights)
    mean = (p[:, None, None] * values).sum(0)
    squares = ((values - mean) ** 2).sum((-2, -1))
    return mean, (p * squares).sum()


# %%
def true_gradient(world, theta, gamma=1.0):
    """ベルマン方程式の J を自動微分した ∇J。"""
    theta = theta.clone().requires_grad_()
    J = solve(world, theta, gamma)[0][world.states[0, 0]]
    return torch.autograd.grad(J, theta)[0]


# %%
gradients, totals = {}, {}
for name, world in worlds.items():
    gradients[name] = true_gradient(world, thetas[name])
    totals[name] = world.rewards.sum(-1, keepdim=True)
    mean, _ = mean_and_variance(world, thetas[name], totals[name])
    claim(f"{name}: ∇J = E[R(τ) Σ∇log π]", gradients[name], mean)

# %% [markdown]
# ### ステップ 3：REINFORCE
#
# 本当の問題では軌跡を数え上げられません。そこで、 $n$ 本だけ歩いて平均します。これが REINFORCE です。
#
# $$
# \widehat g=\frac1n\sum_{i=1}^{n}R(\tau_i)\sum_t\nabla\log\pi_\theta(a_{i,t}\mid s_{i,t})
# $$
#
# 期待値は $\nabla J$ で、偏りはありません（不偏）。誤差の 2 乗の期待値は、1 本の分散を $n$ で割ったもので、誤差は $1/\sqrt n$ で減ります。200 回ずつ引いて、分散から計算した線と比べます。

# %%
counts = [16, 64, 256, 1024, 4096]
errors, predicted = {}, {}
for name, world in worlds.items():
    each = estimates(world, thetas[name], totals[name]).flatten(1)
    _, variance = mean_and_variance(world, thetas[name], totals[name])
    p, rms = world.chance(thetas[name]), []
    for n in counts:
        drawn = torch.multinomial(p.expand(200, -1), n, True, generator=g)
        gap = each[drawn].mean(1) - gradients[name].flatten()
        rms.append((gap**2).sum(-1).mean().sqrt().item())
    errors[name] = rms
    predicted[name] = [(variance / n).sqrt().item() for n in counts]

# %%
from companion.plots import COLOURS, GREY, figure

drawn, ((ax,),) = figure(1, 1, panel=(5.4, 3.2))
for name, colour in zip(worlds, COLOURS, strict=False):
    ax.loglog(counts, errors[name], "o", color=colour, label=f"{name}: 実測")
    ax.loglog(counts, predicted[name], color=colour, linewidth=1,
              label=f"{name}: √(分散/n)")
ax.set(title="REINFORCE の誤差は 1/√n で減る", xlabel="軌跡の数 n",
       ylabel="勾配の誤差（2 乗平均の平方根）")
ax.legend()
drawn

# %%
for name in worlds:
    ratios = [a / b for a, b in zip(errors[name], predicted[name],
                                    strict=True)]
    check(f"{name}: 実測は √(分散/n) のとおり",
          0.85 < min(ratios) and max(ratios) < 1.15,
          f"{min(ratios):.2f}〜{max(ratios):.2f} 倍")
    slope = math.log(errors[name][-1] / errors[name][0]) / math.log(256)
    check(f"{name}: 両対数の傾きは −1/2", abs(slope + 0.5) < 0.04,
          f"{slope:.3f}")

# %% [markdown]
# 誤差を 10 分の 1 にするには、100 倍の軌跡が要ります。ここからステップ 6 までは、期待値を変えずに分散を減らす話です。
#
# ### ステップ 4：将来の報酬だけを足す（reward-to-go）
#
# 時刻 $t$ の行動は、それより前の報酬を変えられません。
#
# **主張** $t'<t$ なら $\mathbb{E}[\nabla\log\pi_\theta(a_t\mid s_t)\,r_{t'}]=0$ です。 $s_t$ までの歩みを固定すれば $r_{t'}$ は定数で、 $\mathbb{E}_{a\sim\pi}[\nabla\log\pi_\theta(a\mid s)]=\nabla\sum_a\pi_\theta(a\mid s)=\nabla1=0$ だからです。
# したがって、 $R(\tau)$ の代わりに $R_t=\sum_{t'\ge t}r_{t'}$ を使っても、勾配の期待値は変わりません。

# %%
def to_go_of(rewards):
    return rewards.flip(-1).cumsum(-1).flip(-1)


def cross(world, theta, t, t_reward):
    """E[∇log π(a_t|s_t)·r_{t'}]"""
    moment = world.chance(theta) * world.rewards[:, t_reward]
    scores = scores_of(world, theta)[:, t]
    return (moment[:, None, None] * scores).sum(0)


# %%
for name, world in worlds.items():
    theta = thetas[name]
    T = world.rewards.shape[1]
    past = [cross(world, theta, t, k) for t in range(T) for k in range(t)]
    claim(f"{name}: 過去の報酬との積の期待値は 0", torch.stack(past), 0.0)
    mean, _ = mean_and_variance(world, theta, to_go_of(world.rewards))
    claim(f"{name}: ∇J = E[Σ R_t ∇log π]", mean, gradients[name])
    size = cross(world, theta, 0, 0).abs().max()
    check(f"{name}: 直後の報酬との積は 0 でない", size > 0.01, f"{size:.3f}")

# %% [markdown]
# **割引率が 1 より小さいとき** は、一つ注意があります。 $J_\gamma=\mathbb{E}[\sum_t\gamma^tr_t]$ の勾配は
#
# $$
# \nabla J_\gamma=\mathbb{E}\Bigl[\sum_t\gamma^t\,\nabla\log\pi_\theta(a_t\mid s_t)\sum_{t'\ge t}\gamma^{t'-t}r_{t'}\Bigr]
# $$
#
# で、外側にも $\gamma^t$ が付きます。PPO を含む多くの実装は、これを省いています。省いた式は、 $\gamma<1$ で 2 歩以上ある世界では、一般に $J_\gamma$ の勾配ではありません。

# %%
GAMMA = 0.8
for name, world in worlds.items():
    powers = GAMMA ** torch.arange(world.rewards.shape[1]).double()
    inner = to_go_of(powers * world.rewards) / powers  # Σ γ^{t'-t} r_t'
    wanted = true_gradient(world, thetas[name], GAMMA)
    full, _ = mean_and_variance(world, thetas[name], powers * inner)
    usual, _ = mean_and_variance(world, thetas[name], inner)
    claim(f"{name}: γ^t を付ければ ∇J_γ", full, wanted)
    gap = (usual - wanted).norm() / wanted.norm()
    check(f"{name}: 省くと違う", gap > 0.05, f"相対的なずれ {gap:.0%}")

# %% [markdown]
# 分散はどうでしょうか。よく「余計な項が減るので、分散も減る」と説明されますが、それは **いつも正しいわけではありません** 。計算してみましょう。廊下と言葉では、たしかに減ります。

# %%
to_go = {name: to_go_of(world.rewards) for name, world in worlds.items()}
for name, world in worlds.items():
    _, before = mean_and_variance(world, thetas[name], totals[name])
    _, after = mean_and_variance(world, thetas[name], to_go[name])
    check(f"{name}: 分散が減る", after < 0.95 * before,
          f"{before:.4f} → {after:.4f}")

# %% [markdown]
# 増える例は、簡単に作れます。2 歩の世界で、はじめに必ず 1 を払い、次に必ず 1 を受け取るとします（ **前払い** ）。収益はいつも 0 なので、 $R(\tau)$ を使う推定は、いつでもちょうど 0、分散も 0 です。 $R_t$ を使うと、2 歩目の重みが $+1$ になります。

# %%
both = torch.cartesian_prod(torch.arange(2), torch.arange(2))
prepaid = Paths(
    states=torch.tensor([[0, 1]]).expand(4, 2), actions=both,
    rewards=double([-1.0, 1.0]).expand(4, 2),
    mask=torch.ones(4, 2, dtype=torch.bool), env=torch.ones(4).double(),
    P=double([[[0, 1], [0, 1]], [[0, 0], [0, 0]]]),
    r=double([[-1, -1], [1, 1]]),
)
even = torch.zeros(2, 2).double()  # どちらの行動も確率 1/2

# %%
for name, weights, expected in (
    ("R(τ)", prepaid.rewards.sum(-1, keepdim=True), 0.0),
    ("R_t", to_go_of(prepaid.rewards), 0.5),
):
    mean, variance = mean_and_variance(prepaid, even, weights)
    claim(f"前払い、{name}: 期待値は 0", mean, true_gradient(prepaid, even))
    claim(f"前払い、{name}: 分散", variance, expected)

# %% [markdown]
# 過去の報酬と将来の報酬が打ち消し合う世界では、過去を捨てるとかえって揺れが増えるのです。条件のない「分散が減る」ではなく、「期待値は変わらない。分散は、たいてい減る」と覚えましょう。
#
# ### ステップ 5：ベースライン
#
# 同じ理由で、状態だけで決まる数 $b(s_t)$ なら、何を引いても期待値は変わりません。
#
# **主張** $\mathbb{E}[\nabla\log\pi_\theta(a_t\mid s_t)\,b(s_t)]=0$ です。行動にもよる $b(s_t,a_t)$ では、一般に 0 になりません。

# %%
for name, world in worlds.items():
    b_s = torch.randn(len(world.r), generator=g).double()
    b_sa = torch.randn(world.r.shape, generator=g).double()
    mean, _ = mean_and_variance(world, thetas[name], b_s[world.states])
    claim(f"{name}: b(s) なら 0", mean, 0.0)
    mean, _ = mean_and_variance(world, thetas[name],
                                b_sa[world.states, world.actions])
    size = mean.abs().max()
    check(f"{name}: b(s, a) では 0 でない", size > 0.05, f"{size:.3f}")

# %% [markdown]
# よく使うベースラインは、価値 $V^\pi(s)$ です。分散を計算します。廊下と言葉では減ります。

# %%
exact_V = {name: solve(world, thetas[name])[0]
           for name, world in worlds.items()}
for name, world in worlds.items():
    _, before = mean_and_variance(world, thetas[name], to_go[name])
    mean, after = mean_and_variance(
        world, thetas[name], to_go[name] - exact_V[name][world.states])
    claim(f"{name}: 期待値は ∇J のまま", mean, gradients[name])
    check(f"{name}: 分散が減る", after < 0.9 * before,
          f"{before:.4f} → {after:.4f}")

# %% [markdown]
# けれども、これも **いつもではありません** 。腕が 2 本（一歩だけの世界）、報酬 $(0,1)$、方策 $(.01,.99)$ とします。良い腕をほとんどいつも引いているところです。

# %%
arms = Paths(
    states=torch.zeros(2, 1, dtype=torch.long),
    actions=torch.tensor([[0], [1]]), rewards=double([[0.0], [1.0]]),
    mask=torch.ones(2, 1, dtype=torch.bool), env=torch.ones(2).double(),
    P=torch.zeros(1, 2, 1).double(), r=double([[0.0, 1.0]]),
)
sure = double([[0.01, 0.99]]).log()


# %%
def arms_variance(b):
    return mean_and_variance(arms, sure, arms.rewards - b)[1]


# %%
V_arms = solve(arms, sure)[0][0]
claim("V = 0.99", V_arms, 0.99)
good, bad = 2 * 0.01**2, 2 * 0.99**2  # 良い腕、悪い腕のスコアの大きさの 2 乗
gradient_2 = 2 * (0.01 * 0.99) ** 2  # ‖∇J‖²
claim("b = 0 の分散（手計算）", arms_variance(0.0),
      0.99 * good - gradient_2)
claim("b = V の分散（手計算）", arms_variance(V_arms),
      0.99 * good * 0.01**2 + 0.01 * bad * 0.99**2 - gradient_2)

# %% [markdown]
# 価値を引くと、分散が 1 万倍近くになりました。めったに引かない悪い腕のスコアはとても大きく、 $b=V$ だと、そこに重み $-0.99$ が掛かるからです。 $b=0$ なら、悪い腕の報酬は 0 なので、何も起きません。
#
# 重みを $R(\tau)-b$ とする推定で、分散を最小にする定数 $b$ は、 $J$ や $V$ ではなく、スコアの和 $\psi=\sum_t\nabla\log\pi_\theta(a_t\mid s_t)$ の大きさ $\|\psi\|^2$ で重みを付けた平均です。
#
# $$
# b^*=\frac{\mathbb{E}\bigl[\|\psi\|^2R(\tau)\bigr]}{\mathbb{E}\bigl[\|\psi\|^2\bigr]}
# $$
#
# 分散は $b$ の 2 次関数で、2 次の係数 $\mathbb{E}[\|\psi\|^2]$ は正なので、 $b^*$ での傾きが 0 なら、そこが最小です。

# %%
def best_constant(world, theta):
    size = (scores_of(world, theta).sum(1) ** 2).sum((-2, -1))
    p = world.chance(theta)
    return ((p * size * world.rewards.sum(-1)).sum() / (p * size).sum())


cases = [("2 本の腕", arms, sure)]
cases += [(name, world, thetas[name]) for name, world in worlds.items()]

# %%
for name, world, theta in cases:
    b = best_constant(world, theta).requires_grad_()
    total = world.rewards.sum(-1, keepdim=True)
    _, variance = mean_and_variance(world, theta, total - b)
    claim(f"{name}: b* で傾き 0", torch.autograd.grad(variance, b)[0], 0.0,
          tol=1e-12)
    J = solve(world, theta)[0][world.states[0, 0]]
    print(f"　b* = {b.item():.4f}、J = {J:.4f}、b* での分散 {variance:.6f}")
claim("2 本の腕なら、b* は悪い腕の確率", best_constant(arms, sure), 0.01)

# %% [markdown]
# ### ステップ 6：アドバンテージ
#
# $R_t$ の（ $s_t,a_t$ を決めたときの）期待値は、行動価値 $Q^\pi(s_t,a_t)$ です。これからベースライン $V^\pi(s_t)$ を引いたものを、 **アドバンテージ** $A^\pi(s,a)=Q^\pi(s,a)-V^\pi(s)$ といいます。「その状態での平均より、その行動がどれだけ良いか」です。
#
# **主張** $\nabla J=\mathbb{E}[\sum_tA^\pi(s_t,a_t)\nabla\log\pi_\theta(a_t\mid s_t)]$ で、どの状態でも $\mathbb{E}_{a\sim\pi}[A^\pi(s,a)]=0$ です。

# %%
exact_A = {}
for name, world in worlds.items():
    V, Q = solve(world, thetas[name])
    exact_A[name] = Q - V[:, None]
    mean_A = (thetas[name].softmax(-1) * exact_A[name]).sum(-1)
    claim(f"{name}: E_a[A(s, a)] = 0", mean_A, 0.0)
    mean, _ = mean_and_variance(world, thetas[name],
                                exact_A[name][world.states, world.actions])
    claim(f"{name}: ∇J = E[Σ A ∇log π]", mean, gradients[name])

# %% [markdown]
# ここまでの推定量は、期待値がどれも $\nabla J$ です。分散を並べます。

# %%
import pandas as pd

variances = {}
for name, world in worlds.items():
    V = exact_V[name][world.states]
    A = exact_A[name][world.states, world.actions]
    variances[name] = {
        label: mean_and_variance(world, thetas[name], weights)[1].item()
        for label, weights in (
            ("R(τ)", totals[name]), ("R_t", to_go[name]),
            ("R_t − V(s_t)", to_go[name] - V), ("A(s_t, a_t)", A),
        )
    }
variances = pd.DataFrame(variances)
variances.round(4)

# %%
check("どちらの世界でも、真のアドバンテージの分散がいちばん小さい",
      (variances.idxmin() == "A(s_t, a_t)").all())

# %% [markdown]
# もちろん、真の $A^\pi$ は誰も知りません。手に入るのは、歩いてみて得た報酬と、学習の途中の価値モデル $V$ だけです。その二つから、なるべく良い $\widehat A_t$ を作るのが、次のステップ 7〜10 です。
#
# ### ステップ 7：TD 誤差
#
# ベルマン方程式から、 $Q^\pi(s,a)=\mathbb{E}[r_t+\gamma V^\pi(s_{t+1})]$ です。そこで **TD 誤差**（temporal-difference error）
#
# $$
# \delta_t=r_t+\gamma V(s_{t+1})-V(s_t)
# $$
#
# を作ると、 $V=V^\pi$ なら、 $\mathbb{E}[\delta_t\mid s_t,a_t]=A^\pi(s_t,a_t)$ です。終わった後の価値は 0 とします。
# $V$ が真の価値から $e(s)=V(s)-V^\pi(s)$ だけずれていると、偏りが出ます。
#
# $$
# \mathbb{E}[\delta_t\mid s_t,a_t]=A^\pi(s_t,a_t)+\gamma\,\mathbb{E}[e(s_{t+1})\mid s_t,a_t]-e(s_t)
# $$
#
# 最後の項は状態だけの関数なので、ベースラインと同じで、勾配を偏らせません。問題は **次の状態の誤差** です。

# %%
def along(world, table):
    """状態の表 (S,) の値を軌跡に並べる。(N, T)、詰め物では 0。"""
    return torch.where(world.mask, table[world.states], 0.0)


def td_errors(world, table, gamma=1.0):
    values = along(world, table)
    after = torch.nn.functional.pad(values[:, 1:], (0, 1))
    return world.rewards + gamma * after - values


# %%
def given_state_and_action(world, theta, values):
    """E[値 | s, a] (S, A)。訪れない組は NaN。"""
    p = (world.chance(theta)[:, None] * world.mask).flatten()
    cell = (world.states * world.r.shape[1] + world.actions).flatten()
    sums = torch.zeros(2, world.r.numel()).double()
    sums[0].index_add_(0, cell, p * values.flatten())
    sums[1].index_add_(0, cell, p)
    return (sums[0] / sums[1]).reshape(world.r.shape)


# %%
wrong_V = {name: V + 0.5 * torch.randn(V.shape, generator=g).double()
           for name, V in exact_V.items()}
for name, world in worlds.items():
    seen = given_state_and_action(world, thetas[name], world.rewards)
    seen = ~seen.isnan()
    for label, table in (("真の V", exact_V[name]), ("誤った V",
                                                  wrong_V[name])):
        mean = given_state_and_action(
            world, thetas[name], td_errors(world, table))
        e = table - exact_V[name]
        biased = exact_A[name] + world.P @ e - e[:, None]
        claim(f"{name}、{label}: E[δ] = A + E[e(s')] − e(s)",
              mean[seen], biased[seen])

# %% [markdown]
# ### ステップ 8：多段の推定
#
# TD 誤差は、一歩先の $V$ に頼ります。もっと先まで実際の報酬を使い、それから $V$ に頼ることもできます。
#
# $$
# \widehat A_t^{(n)}=r_t+\gamma r_{t+1}+\dots+\gamma^{n-1}r_{t+n-1}+\gamma^nV(s_{t+n})-V(s_t)
# $$
#
# **主張** これは、TD 誤差の割引和です。 $\widehat A_t^{(n)}=\sum_{k=0}^{n-1}\gamma^k\delta_{t+k}$ 。途中の $V$ が、隣どうしで打ち消し合って消えるからです（望遠鏡の和）。 $V$ は何でも構いません。

# %%
def n_step(world, table, t, n, gamma):
    """定義のとおりの Â_t^(n)。(N,)"""
    values, T = along(world, table), world.rewards.shape[1]
    total = -values[:, t]
    for k in range(n):
        if t + k < T:
            total = total + gamma**k * world.rewards[:, t + k]
    if t + n < T:
        total = total + gamma**n * values[:, t + n]
    return total


# %%
for name, world in worlds.items():
    deltas, T = td_errors(world, wrong_V[name], GAMMA), world.mask.shape[1]
    for n in (1, 2, T):
        powers = GAMMA ** torch.arange(n).double()
        sums = (powers * deltas[:, :n]).sum(-1)
        claim(f"{name}、n = {n}: Â^(n) = Σ γ^k δ",
              n_step(world, wrong_V[name], 0, n, GAMMA), sums)

# %% [markdown]
# ### ステップ 9：GAE
#
# $n$ を一つに決めず、すべての $n$ を $\lambda^{n-1}$ の重みで混ぜるのが **GAE**（generalized advantage estimation）です。終わりまで $M$ 歩残っているなら、
#
# $$
# \widehat A_t=(1-\lambda)\sum_{n=1}^{M-1}\lambda^{n-1}\widehat A_t^{(n)}+\lambda^{M-1}\widehat A_t^{(M)}
# $$
#
# です。最後の項に $1-\lambda$ が **付かない** ことに注意してください。無限に続く和 $(1-\lambda)\sum_{n\ge1}\lambda^{n-1}$ の、 $n\ge M$ の分をまとめたものだからで、これがないと重みの和が 1 になりません。
#
# **主張** この重み付き和は、TD 誤差の割引和 $\sum_l(\gamma\lambda)^l\delta_{t+l}$ に等しく、後ろから一度に計算する漸化式 $\widehat A_t=\delta_t+\gamma\lambda\widehat A_{t+1}$ とも等しくなります。
# `gae` は、漸化式を計算するパッケージの関数です。

# %%
from companion.losses import gae


def mixed(world, table, gamma, lam, with_last=True):
    """定義のとおりの重み付き和。残りの歩数 M は、軌跡ごとに違う。"""
    T = world.rewards.shape[1]
    result = torch.zeros_like(world.rewards)
    left = to_go_of(world.mask.long())  # 残りの歩数 M の表 (N, T)
    for t, n in product(range(T), range(1, T + 1)):
        inner = (1 - lam) * lam ** (n - 1)
        last = lam ** (n - 1) if with_last else inner
        weight = (inner * (n < left[:, t]).double()
                  + last * (n == left[:, t]).double())
        result[:, t] += weight * n_step(world, table, t, n, gamma)
    return result


# %%
LAM = 0.7
for name, world in worlds.items():
    deltas, T = td_errors(world, wrong_V[name], GAMMA), world.mask.shape[1]
    sums = torch.stack([
        sum((GAMMA * LAM) ** (k - t) * deltas[:, k] for k in range(t, T))
        for t in range(T)], -1)
    by_package, _ = gae(world.rewards, along(world, wrong_V[name]),
                        world.mask, GAMMA, LAM)
    by_weights = mixed(world, wrong_V[name], GAMMA, LAM)
    claim(f"{name}: 重み付き和 = Σ(γλ)^l δ", by_weights, sums)
    claim(f"{name}: 漸化式 = Σ(γλ)^l δ", by_package, sums)
    gap = (mixed(world, wrong_V[name], GAMMA, LAM, False) - sums).abs().max()
    check(f"{name}: 最後の項がないと違う", gap > 0.1, f"差 {gap:.3f}")

# %% [markdown]
# 二つの極限は、よく知ったものになります。 $\lambda=0$ では TD 誤差、 $\lambda=1$ では $R_t-V(s_t)$ （ $\gamma=1$ のとき）です。

# %%
for name, world in worlds.items():
    values = along(world, wrong_V[name])
    at_0, _ = gae(world.rewards, values, world.mask, 1.0, 0.0)
    at_1, _ = gae(world.rewards, values, world.mask, 1.0, 1.0)
    claim(f"{name}: λ = 0 は TD 誤差", at_0, td_errors(world, wrong_V[name]))
    claim(f"{name}: λ = 1 は R_t − V", at_1, to_go[name] - values)

# %% [markdown]
# ### ステップ 10：偏りと、途中で切ったときの V
#
# **主張** $\gamma=1$ とします。 $\widehat A_t$ を使った勾配の期待値は、 $\lambda=1$ なら、 **どんな $V$ でも** $\nabla J$ です（ $V(s_t)$ はただのベースラインなので）。 $\lambda<1$ では、真の $V^\pi$ なら $\nabla J$ ですが、誤った $V$ では一般に偏ります。
# $\widehat A_t$ そのものと、勾配とを、分けて考えてください。 $\lambda=1$ でも、 $\widehat A_t$ の期待値は $A^\pi-e(s_t)$ で、 $A^\pi$ からずれています。それでも勾配は偏りません。

# %%
def gae_gradient(world, theta, table, lam):
    advantages, _ = gae(world.rewards, along(world, table), world.mask, 1.0,
                        lam)
    return mean_and_variance(world, theta, advantages)


# %%
for name, world in worlds.items():
    theta, wanted = thetas[name], gradients[name]
    for lam in (0.0, 0.7):
        mean, _ = gae_gradient(world, theta, exact_V[name], lam)
        claim(f"{name}、λ = {lam}、真の V: 偏りなし", mean, wanted)
        mean, _ = gae_gradient(world, theta, wrong_V[name], lam)
        gap = (mean - wanted).norm() / wanted.norm()
        check(f"{name}、λ = {lam}、誤った V: 偏る", gap > 0.03, f"{gap:.0%}")
    mean, _ = gae_gradient(world, theta, wrong_V[name], 1.0)
    claim(f"{name}、λ = 1、誤った V: 偏りなし", mean, wanted)

# %%
for name, world in worlds.items():
    values = along(world, wrong_V[name])
    at_1, _ = gae(world.rewards, values, world.mask, 1.0, 1.0)
    mean = given_state_and_action(world, thetas[name], at_1)
    seen = ~mean.isnan()
    e = (wrong_V[name] - exact_V[name])[:, None]
    claim(f"{name}、λ = 1: E[Â] = A − e(s)", mean[seen],
          (exact_A[name] - e)[seen])

# %% [markdown]
# $\lambda$ と偏り・分散の関係は、実験 1 で詳しく見ます。
#
# **途中で切ったとき** にも、注意が要ります。廊下の軌跡を 3 歩で切って学習に使うとしましょう。宝か穴に着いて本当に **終わった** 軌跡と、まだ続くのに **切った** 軌跡は違います。後者では、切ったところの $\gamma V(s_T)$ を、最後の報酬に足さなければなりません（ブートストラップ）。真の $V^\pi$ で確かめます（ $\gamma=1$ ）。 `gae` は、最後のトークンの後の価値を 0 とみなすからです。

# %%
hall, hall_theta = worlds["廊下"], thetas["廊下"]
V_hall, A_hall = exact_V["廊下"], exact_A["廊下"]
K = 3
kept = hall.mask[:, :K]
goes_on = hall.mask[:, K]  # 3 歩では終わらない軌跡
short = hall.rewards[:, :K].clone()
bootstrapped = short.clone()
bootstrapped[goes_on, K - 1] += V_hall[hall.states[goes_on, K]]


# %%
def first_steps(weights):
    p = hall.chance(hall_theta)[:, None, None, None]
    scores = scores_of(hall, hall_theta)[:, :K]
    return (p * scores * weights[..., None, None]).sum((0, 1))


# %%
wanted = first_steps(A_hall[hall.states, hall.actions][:, :K])
for lam in (0.0, 0.7, 1.0):
    found = {label: first_steps(gae(
        rewards, along(hall, V_hall)[:, :K], kept, 1.0, lam)[0])
        for label, rewards in (("V", bootstrapped), ("0", short))}
    claim(f"λ = {lam}: V(s_T) を足せば正しい", found["V"], wanted)
    gap = (found["0"] - wanted).norm() / wanted.norm()
    check("　足さないと偏る", gap > 0.1, f"相対的なずれ {gap:.0%}")

# %% [markdown]
# 4 歩の時間切れは、この世界の決まりであって、切ったのではありません（時間切れの後には、本当に何もありません）。言語モデルの「長さの上限で打ち切られた回答」も、そこで報酬をもらって終わるなら、終わりです。
#
# ### ステップ 11：重要度比と、代理の目的関数
#
# ここまでの勾配は、いまの方策で歩いた軌跡でしか計算できません（方策オン）。一歩更新するたびに歩きなおすのは、もったいない話です。古い方策 $\pi_{\theta_{\mathrm{old}}}$ で歩いた軌跡を、何度か使いまわせないでしょうか。
#
# **主張** 軌跡全体の重要度比 $\rho(\tau)=\prod_tw_t(\theta)$、 $w_t(\theta)=\frac{\pi_\theta(a_t\mid s_t)}{\pi_{\theta_{\mathrm{old}}}(a_t\mid s_t)}$ を掛ければ、 $J(\theta)=\mathbb{E}_{\mathrm{old}}[\rho(\tau)R(\tau)]$ です（古い方策が、新しい方策のとりうる行動をすべてとりうるとします）。ここでも環境の確率は約分されて消えます。
# 正確ですが、歩くほど比が掛かっていくので、揺れは大きくなります。一歩目だけの比 $w_0$ の分散と比べます。

# %%
new_thetas = {name: theta + 0.5 * torch.randn(theta.shape, generator=g)
              for name, theta in thetas.items()}


def J_of(world, theta):
    return solve(world, theta)[0][world.states[0, 0]]


# %%
for name, world in worlds.items():
    old, new = thetas[name], new_thetas[name]
    rho = (world.logps(new) - world.logps(old)).sum(-1).exp()
    p = world.chance(old)
    claim(f"{name}: E_old[ρ R] = J(θ)", (p * rho * totals[name][:, 0]).sum(),
          J_of(world, new))
    first = (world.logps(new) - world.logps(old))[:, 0].exp()
    spread_1, spread_all = ((p * (x - 1) ** 2).sum() for x in (first, rho))
    check(f"{name}: ρ の分散は w_0 の分散より大きい",
          spread_all > 1.2 * spread_1, f"{spread_1:.3f} → {spread_all:.3f}")

# %% [markdown]
# そこで、別の等式から出発します。
#
# **主張** （性能差の等式） $J(\theta)-J(\theta_{\mathrm{old}})=\mathbb{E}_{\tau\sim p_\theta}\bigl[\sum_tA^{\mathrm{old}}(s_t,a_t)\bigr]$ です。古い方策のアドバンテージを、 **新しい方策で歩いて** 足したものが、ちょうど性能の差です。

# %%
def along_pairs(world, table):
    return torch.where(world.mask, table[world.states, world.actions], 0.0)


# %%
def old_advantages(world, old):
    V, Q = solve(world, old)
    return along_pairs(world, Q - V[:, None])


# %%
for name, world in worlds.items():
    old, new = thetas[name], new_thetas[name]
    A_sum = old_advantages(world, old).sum(-1)
    claim(f"{name}: J(θ) − J(old) = E_θ[Σ A^old]",
          J_of(world, new) - J_of(world, old),
          (world.chance(new) * A_sum).sum())

# %% [markdown]
# 行動についての期待値だけを重要度比で直し、 **訪れる状態は古い方策のまま** にしたのが、代理の目的関数（surrogate）です。
#
# $$
# L(\theta)=\mathbb{E}_{\tau\sim p_{\mathrm{old}}}\Bigl[\sum_tw_t(\theta)\,A^{\mathrm{old}}(s_t,a_t)\Bigr]
# $$
#
# **主張** $\theta=\theta_{\mathrm{old}}$ では $L=0$ で、 $\nabla L=\nabla J$ です（トークンについて **和** をとり、 $\gamma=1$ のとき）。離れると、 $L(\theta)$ と本当の伸び $J(\theta)-J(\theta_{\mathrm{old}})$ の差は、距離の **2 乗** で大きくなります。 $\nabla J$ の向きに、距離 $h$ だけ動いてみます。

# %%
def surrogate_gain(world, old, new):
    w = (world.logps(new) - world.logps(old)).exp()
    A = old_advantages(world, old)
    return (world.chance(old)[:, None] * w * A).sum()


# %%
for name, world in worlds.items():
    old = thetas[name]
    leaf = old.clone().requires_grad_()
    L = surrogate_gain(world, old, leaf)
    claim(f"{name}: θ_old で L = 0", L, 0.0)
    claim(f"{name}: θ_old で ∇L = ∇J", torch.autograd.grad(L, leaf)[0],
          gradients[name])

# %%
sizes, rows = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125), {}
for name, world in worlds.items():
    old = thetas[name]
    direction = gradients[name] / gradients[name].norm()
    for h in sizes:
        new = old + h * direction
        true = (J_of(world, new) - J_of(world, old)).item()
        hoped = surrogate_gain(world, old, new).item()
        rows[name, h] = {"代理の伸び": hoped, "本当の伸び": true,
                         "差": hoped - true, "差 ÷ h²": (hoped - true) / h**2}
second_order = pd.DataFrame(rows).T
second_order.round(6)

# %%
for name in worlds:
    gaps = second_order.loc[name, "差"]
    shrink = [gaps[2 * h] / gaps[h] for h in sizes[-2:]]
    check(f"{name}: 距離を半分にすると、差は 1/4 になる",
          all(abs(s - 4) < 0.3 for s in shrink),
          "、".join(f"1/{s:.2f}" for s in shrink))

# %% [markdown]
# 代理の目的関数は、「少ししか動かないうちは」信じてよいのです。では、どれだけ動いたら信じるのをやめるか。それがクリッピングです。その前に、和と平均の話を一つしておきます。
#
# **トークンで平均すると。** 実装では、和 $\sum_t$ をそのまま使わず、バッチの全トークンで平均することがよくあります。長さがまちまちだと、平均は $\frac{\sum_i\sum_t(\cdots)}{\sum_i|\tau_i|}$ という **比の推定量** です。分母もサンプルなので、期待値は、一般に $\nabla J/\mathbb{E}|\tau|$ に等しくありません。軌跡の数を増やすと近づきます。言葉の世界で、 $n$ 本の組をすべて数え上げます。

# %%
tongue, tongue_theta = worlds["言葉"], thetas["言葉"]
each = estimates(tongue, tongue_theta, to_go["言葉"]).flatten(1)
p, lengths = tongue.chance(tongue_theta), tongue.mask.sum(-1)
limit = gradients["言葉"].flatten() / (p * lengths).sum()

bias = {}
for n in (1, 2, 3, 4):
    rows = torch.cartesian_prod(*[torch.arange(15)] * n).reshape(-1, n)
    mean = each[rows].sum(1) / lengths[rows].sum(-1, keepdim=True)
    mean = (p[rows].prod(-1, keepdim=True) * mean).sum(0)
    bias[n] = ((mean - limit).norm() / limit.norm()).item()
print("相対的な偏り:", {n: f"{b:.1%}" for n, b in bias.items()})

# %%
check("トークン平均は偏っている", bias[1] > 0.02, f"1 本で {bias[1]:.1%}")
check("軌跡の数にほぼ反比例して、偏りが減る",
      all(0.6 < n * bias[n] / bias[1] < 1.1 for n in bias),
      "n × 偏り: " + "、".join(f"{n * bias[n]:.2f}" for n in bias))

# %% [markdown]
# ### ステップ 12：クリッピング
#
# PPO の目的関数 (2.29) は、一つの行動ごとに
#
# $$
# \min\Bigl\{w_t(\theta)\widehat A_t,\ \mathrm{clip}\bigl(w_t(\theta),1-\epsilon,1+\epsilon\bigr)\widehat A_t\Bigr\},\qquad
# w_t(\theta)=\frac{\pi_\theta(a_t\mid s_t)}{\pi_{\theta_{\mathrm{old}}}(a_t\mid s_t)}
# $$
#
# です。 $\mathrm{clip}(w,1-\epsilon,1+\epsilon)$ は、 $w$ を区間の中に押し込めた値です。比 $w$ が区間の外に出るのは 2 通り、 $\widehat A$ の符号が 2 通りで、四つの場合があります。 `ppo_policy_loss` は、これを全トークンで平均して符号を反転した、パッケージの関数です（中身は「実装」で読みます）。

# %%
from companion.losses import ppo_policy_loss

one = torch.ones(1, 1)


# %%
def objective_and_slope(loss, ratio, A, epsilon=0.2):
    """1 トークンの目的関数の値と、log w についての傾き。"""
    log_w = double([[ratio]]).log().requires_grad_()
    value = -loss(log_w, torch.zeros(1, 1).double(), A * one.double(), one,
                  epsilon)
    return value.item(), torch.autograd.grad(value, log_w)[0].item()


# %%
FOUR = ((1.5, +1.0, 1.2, 0.0), (1.5, -1.0, -1.5, -1.5),
        (0.5, +1.0, 0.5, 0.5), (0.5, -1.0, -0.8, 0.0))
for ratio, A, value, slope in FOUR:
    claim(f"w = {ratio}、A = {A:+g}: 値、log w についての傾き",
          objective_and_slope(ppo_policy_loss, ratio, A), [value, slope])

# %%
w_line = torch.linspace(0.4, 1.8, 281).double()
drawn, (axes,) = figure(1, 2, panel=(4.2, 2.8))
for ax, A in zip(axes, (1.0, -1.0), strict=True):
    clipped = [objective_and_slope(ppo_policy_loss, w, A)[0]
               for w in w_line.tolist()]
    ax.plot(w_line, w_line * A, ":", color=GREY, label="クリップしない wA")
    ax.plot(w_line, clipped, color=COLOURS[0], label="min をとった後")
    ax.axvline(1, color=GREY, linewidth=0.6)
    ax.set(xlabel="重要度比 w", ylabel="目的関数（1 トークン、ε = 0.2）")
axes[0].set_title("A = +1: w > 1.2 で平ら")
axes[1].set_title("A = −1: w < 0.8 で平ら")
axes[0].legend(loc="lower right")
drawn

# %% [markdown]
# 傾きが 0 になるのは、良い行動（ $A>0$ ）がもう十分に出やすくなったときと、悪い行動（ $A<0$ ）がもう十分に出にくくなったときです。 **間違った向き** に動いてしまったとき（ $A>0$ で $w<1-\epsilon$、 $A<0$ で $w>1+\epsilon$ ）には、切られず、引き戻す力が残ります。 $\min$ が要るのはそのためです。
#
# **主張** $\min$ をとった値は、いつでも $wA$ 以下です（控えめな、悲観的な見積もり）。また、 $w=1$ では、 $\epsilon>0$ がいくつでも値も勾配も同じです。つまり、歩いた直後の **1 回目の更新では、クリッピングは何もしません** （ $\pi_{\theta_{\mathrm{old}}}$ が、いまの方策そのものなら）。

# %%
from companion.losses.surrogate import clipped_surrogate

log_w = torch.randn(10_000, generator=g).double()
A = torch.randn(10_000, generator=g).double()
slack = log_w.exp() * A - clipped_surrogate(log_w, A, 0.2, 0.2)
check("min をとった値 ≤ wA（1 万組）", slack.min() >= 0,
      f"差が 0 でないのは {(slack > 0).double().mean():.0%}")

# %%
for epsilon in (0.2, 1e-3):
    for A_sign in (1.0, -1.0):
        claim(f"w = 1、ε = {epsilon}、A = {A_sign:+g}: 値も傾きも A",
              objective_and_slope(ppo_policy_loss, 1.0, A_sign, epsilon),
              A_sign)


# %% [markdown]
# **よくある間違い** を二つ見ておきます。 $\min$ を $\max$ にする間違いと、 $A$ の符号で $\min$ と $\max$ を使い分ける間違いです。どちらも、「 $A<0$ のときは向きを逆にしないと」と考えると、やってしまいがちです。

# %%
def mutant(pick):
    def loss(logps, old_logps, advantages, mask, epsilon):
        w = (logps - old_logps).exp()
        plain, clipped = w * advantages, advantages * w.clamp(
            1 - epsilon, 1 + epsilon)
        return -pick(plain, clipped, advantages).mean()

    return loss


# %%
minimum, maximum = torch.minimum, torch.maximum
mutants = {
    "min（正しい）": mutant(lambda x, y, A: minimum(x, y)),
    "max": mutant(lambda x, y, A: maximum(x, y)),
    "A の符号で": mutant(lambda x, y, A: torch.where(
        A >= 0, minimum(x, y), maximum(x, y))),
}

# %%
slopes = pd.DataFrame({
    name: {f"w = {ratio}、A = {A:+g}": objective_and_slope(loss, ratio, A)[1]
           for ratio, A, *_ in FOUR} for name, loss in mutants.items()
})
slopes

# %%
claim("A の符号で選ぶと、悪い行動が増えても引き戻さない",
      slopes.loc["w = 1.5、A = -1", "A の符号で"], 0.0)
claim("　もう十分に減った悪い行動は、減らしつづける",
      slopes.loc["w = 0.5、A = -1", "A の符号で"], -0.5)
claim("max では、四つとも逆になる",
      (slopes["max"] == 0).astype(float),
      (slopes["min（正しい）"] != 0).astype(float))

# %% [markdown]
# **クリッピングは信頼領域ではありません。** 信頼領域（trust region）とは、「この範囲から出ない」という制約です。クリッピングは、得になる側の範囲の外で **勾配を 0 にする** だけで、外に出ることを禁じません。二つの例を計算します。
#
# 一つめ。1 回目の更新は $w=1$ で行われるので、何も切られません。学習率が大きければ、その一歩で、いくらでも外へ出ます。

# %%
def clipped_gain(world, old, new, epsilon=0.2):
    """E_old[Σ min{wA, clip(w)A}]"""
    log_w = world.logps(new) - world.logps(old)
    kept = clipped_surrogate(log_w, old_advantages(world, old), epsilon,
                             epsilon)
    return (world.chance(old)[:, None] * kept).sum()


# %%
leaf = hall_theta.clone().requires_grad_()
step = torch.autograd.grad(clipped_gain(hall, hall_theta, leaf), leaf)[0]
far = hall_theta + 20 * step
w = (hall.logps(far) - hall.logps(hall_theta)).exp()[hall.mask]
check("一歩で、比が区間の外へ出る", w.max() > 1.5 and w.min() < 0.5,
      f"w は {w.min():.2f}〜{w.max():.2f}")

# %%
leaf = far.clone().requires_grad_()
clipped = clipped_gain(hall, hall_theta, leaf)
back = torch.autograd.grad(clipped, leaf)[0]
pulled = (far - hall_theta).flatten() @ back.flatten()
check("そこで勾配はほとんど 0、引き戻しもしない",
      back.norm() < 0.05 * step.norm() and pulled >= 0,
      f"大きさは出発点の {back.norm() / step.norm():.1%}")

# %% [markdown]
# 二つめ。 $wA$ の悲観的な見積もりではあっても、本当の性能 $J$ の下限ではありません。次の **分かれ道** を考えます。左の部屋にも右の部屋にも、報酬 $-1$ と $+1$ の腕が 1 本ずつあり、古い方策はどちらの部屋でも半々に選びます。部屋の価値はどちらも 0 なので、分かれ道でのアドバンテージは、左も右も 0 です。古い方策は、ほとんど右（確率 0.95）へ行きます。
#
# 新しい方策は、右の部屋では少し良くなり（ $+1$ の腕を 0.6 ）、左の部屋ではいつも $-1$ の腕を選び、しかも、ほとんど左へ行くとします。

# %%
three = torch.cartesian_prod(torch.arange(2), torch.arange(2))
fork = Paths(
    states=torch.stack([torch.zeros(4).long(), 1 + three[:, 0]], -1),
    actions=three,
    rewards=torch.stack([torch.zeros(4), 2.0 * three[:, 1] - 1], -1).double(),
    mask=torch.ones(4, 2, dtype=torch.bool), env=torch.ones(4).double(),
    P=double([[[0, 1, 0], [0, 0, 1]], [[0] * 3] * 2, [[0] * 3] * 2]),
    r=double([[0, 0], [-1, 1], [-1, 1]]),
)
old_fork = double([[0.05, 0.95], [0.5, 0.5], [0.5, 0.5]]).log()
new_fork = double([[0.95, 0.05], [1 - 1e-9, 1e-9], [0.4, 0.6]]).log()

# %%
hoped = clipped_gain(fork, old_fork, new_fork)
true = J_of(fork, new_fork) - J_of(fork, old_fork)
claim("クリッピングした目的関数（手計算）", hoped,
      0.05 * -1 + 0.95 * (0.5 * 1.2 - 0.5 * 0.8), tol=1e-8)
claim("本当の伸び（手計算）", true, 0.95 * -1 + 0.05 * 0.2, tol=1e-8)

# %% [markdown]
# 目的関数は $+0.14$ なのに、性能は $-0.94$ です。目的関数は「左の部屋には 5 % しか行かない」という **古い** 訪れ方で、左の部屋の悪化を数えています。分かれ道で左の比は $w=19$ にもなりましたが、アドバンテージが 0 なので、クリッピングは何も言いません。

# %% [markdown]
# では、クリッピングは何の役に立つのでしょうか。実験 2 と実験 3 で見ます。
#
# ### ステップ 13：価値の損失
#
# 価値モデル $V_\phi$ は、 $\widehat A_t+V_{\mathrm{old}}(s_t)$ を目標とする 2 乗誤差で学習します。 $\lambda=1$ なら、目標は $R_t$ です。
#
# **主張** 目標が $R_t$ なら、2 乗誤差の期待値の勾配は $V_\phi=V^\pi$ で 0 です（2 乗誤差を最小にするのは、条件つき期待値だからです）。

# %%
for name, world in worlds.items():
    for label, table in (("真の V", exact_V[name]), ("誤った V",
                                                  wrong_V[name])):
        leaf = table.clone().requires_grad_()
        squares = (along(world, leaf) - to_go[name]) ** 2 * world.mask
        loss = (world.chance(thetas[name])[:, None] * squares).sum() / 2
        slope = torch.autograd.grad(loss, leaf)[0].abs().max()
        if label == "真の V":
            claim(f"{name}、{label}: 勾配 0", slope, 0.0)
        else:
            check(f"{name}、{label}: 勾配は 0 でない", slope > 0.01)

# %% [markdown]
# TRL を含む多くの実装は、価値のほうもクリッピングします。動かした値 $V$ と、 $V_{\mathrm{old}}\pm\epsilon$ に押し込めた値の、 **大きいほう** の 2 乗誤差の半分です（式 (2.29) の方策の項とは、別の工夫です）。 `ppo_value_loss` がその関数です。 $V$ が $\epsilon$ より動き、しかも押し込めた値のほうが目標から遠いとき（目標のほうへ動きすぎたとき）に、勾配が止まります。

# %%
from companion.losses import ppo_value_loss


def value_loss_and_slope(value, old, target, epsilon=0.2):
    leaf = double([[value]]).requires_grad_()
    loss = ppo_value_loss(leaf, double([[old]]), double([[target]]), one,
                          epsilon)
    return loss.item(), torch.autograd.grad(loss, leaf)[0].item()


# %%
for text, value, target, expected in (
    ("範囲の中", 0.1, 1.0, (0.405, -0.9)),
    ("目標へ 0.5 動いた: 止まる", 0.5, 1.0, (0.32, 0.0)),
    ("逆へ 0.5 動いた: 止まらない", -0.5, 1.0, (1.125, -1.5)),
    ("目標を通り越した", 0.5, 0.3, (0.02, 0.2)),
):
    claim(text, value_loss_and_slope(value, 0.0, target), expected)

# %% [markdown]
# ここでの $\epsilon$ は比ではなく、 **価値そのものの単位** の幅です。報酬の目盛りを 100 倍にすると、同じ $\epsilon$ は 100 倍きつくなります。
#
# ### ステップ 14：エントロピー
#
# 方策が早く決めつけないように、訪れた状態でのエントロピー $H(s)=-\sum_a\pi_\theta(a\mid s)\log\pi_\theta(a\mid s)$ の平均を、目的関数に足すことがあります。言葉の世界で、系列全体のエントロピー $H=-\sum_yp(y)\log p(y)$ と比べます。
#
# **主張** 値は等しく、 $H=\mathbb{E}[\sum_tH(s_t)]$ です（次の状態が行動だけで決まるとき）。しかし **勾配は等しくありません** 。訪れた状態を固定して $H(s_t)$ だけを微分すると、「どの状態へ行くか」を通した分
# $\mathbb{E}\bigl[\sum_t\nabla\log\pi_\theta(a_t\mid s_t)\sum_{t'>t}H(s_{t'})\bigr]$ が落ちます。

# %%
leaf = tongue_theta.clone().requires_grad_()
p = tongue.chance(leaf)
state_H = -(leaf.softmax(-1) * leaf.log_softmax(-1)).sum(-1)
H_along = along(tongue, state_H)
H_sequence = -(p * p.log()).sum()
frozen = p.detach()
bonus = (frozen[:, None] * H_along).sum()
claim("H = E[Σ_t H(s_t)]", H_sequence, bonus)

# %%
whole = torch.autograd.grad(H_sequence, leaf, retain_graph=True)[0]
per_state = torch.autograd.grad(bonus, leaf, retain_graph=True)[0]
later = to_go_of(H_along.detach()) - H_along.detach()
missing, _ = mean_and_variance(tongue, tongue_theta, later)
claim("∇H − 状態ごとの勾配 = 落ちた分", whole - per_state, missing)
check("落ちた分は 0 でない", missing.norm() > 0.1 * whole.norm(),
      f"∇H の {missing.norm() / whole.norm():.0%}")

# %% [markdown]
# 一歩だけの世界では、落ちる分がないので、等しくなります。

# %%
leaf = sure.clone().requires_grad_()
p = arms.chance(leaf)
H = -(p * p.log()).sum()
by_hand = -(p * (p.log() + H)).detach()  # H(s) をロジットで微分したもの
claim("一歩なら、∇H は状態ごとの勾配（手計算）に等しい",
      torch.autograd.grad(H, leaf)[0][0], by_hand)

# %% [markdown]
# ### ステップ 15：KL の項
#
# クリッピングの代わりに（あるいは、それと一緒に）、古い方策からの KL ダイバージェンスを罰として引く形もあります。 $\beta D_{\mathrm{KL}}[p_{\mathrm{old}}\|p_\theta]$ です。
#
# **主張** $\theta_{\mathrm{old}}$ では、KL の値も勾配も 0 で、2 階微分は、スコアの和 $\psi$ の共分散 $\mathbb{E}[\psi\psi^\top]$ （フィッシャー情報行列）です。だから、罰は「近くではほとんど効かず、離れると 2 次で効く」ことになります。ステップ 11 の「差は 2 次」と、ちょうどかみ合う形です。

# %%
def kl_from_old(flat):
    theta = flat.reshape(7, 3)
    old_p = tongue.chance(tongue_theta)
    log_ratio = tongue.logps(tongue_theta) - tongue.logps(theta)
    return (old_p * log_ratio.sum(-1)).sum()


# %%
flat = tongue_theta.flatten()
slope = torch.autograd.functional.jacobian(kl_from_old, flat)
curvature = torch.autograd.functional.hessian(kl_from_old, flat)
psi = scores_of(tongue, tongue_theta).sum(1).flatten(1)
fisher = (tongue.chance(tongue_theta)[:, None] * psi).T @ psi
claim("θ_old で ∇KL = 0", slope, 0.0)
claim("θ_old で KL の 2 階微分 = E[ψψᵀ]", curvature, fisher)

# %% [markdown]
# RLHF では、もう一つ別の KL が出てきます。 **参照方策** $\pi_{\mathrm{ref}}$ からの KL です。これは一度の更新の幅ではなく、学習全体でどこまで離れてよいかを決めます。
#
# **主張** $D_{\mathrm{KL}}[p_\theta\|p_{\mathrm{ref}}]=\mathbb{E}_\theta\bigl[\sum_t\log\frac{\pi_\theta(a_t\mid s_t)}{\pi_{\mathrm{ref}}(a_t\mid s_t)}\bigr]$ です（環境の確率は約分されます）。したがって $J-\beta D_{\mathrm{KL}}$ は、報酬を一歩ごとに $r_t-\beta\log\frac{\pi_\theta}{\pi_{\mathrm{ref}}}$ に変えた世界の収益の期待値です。この形の報酬が、4.4.3 節の式 (4.10) です。

# %%
beta = 0.3
for name, world in worlds.items():
    theta, ref = thetas[name], new_thetas[name]  # 別の方策を参照方策とする
    p, ref_p = world.chance(theta), world.chance(ref)
    kl = (p * (p.log() - ref_p.log())).sum()
    new_rewards = world.rewards - beta * (
        world.logps(theta) - world.logps(ref))
    claim(f"{name}: J − βKL = E[Σ(r_t − β log π/π_ref)]",
          J_of(world, theta) - beta * kl, (p * new_rewards.sum(-1)).sum())

# %% [markdown]
# これで道の終わりです。PPO が最大にするのは、(2.29) から価値の損失を引き、必要ならエントロピーを足した
#
# $$
# \mathbb{E}_t\Bigl[\min\{w_t\widehat A_t,\ \mathrm{clip}(w_t,1-\epsilon,1+\epsilon)\widehat A_t\}\Bigr]-c_1L_V(\phi)+c_2\,\mathbb{E}_t[H(s_t)]
# $$
#
# です。 $L_V$ はステップ 13 の価値の損失、 $c_1,\ c_2$ は係数です。


# %% [markdown]
# ## 実装
#
# GAE と、二つの損失を、そのまま NumPy で書きます。長さはまちまちなので、値は「軌跡ごとの列」をリストに入れて渡します。GAE は漸化式ではなく、定義の和 $\widehat A_t=\sum_{l\ge0}(\gamma\lambda)^l\delta_{t+l}$ で書きます。

# %%
import numpy as np


def gae_numpy(rewards, values, gamma, lam):
    advantages = []
    for r, V in zip(rewards, values, strict=True):
        N = len(r)
        V = [*V, 0.0]  # 終わった後の価値は 0
        delta = [r[t] + gamma * V[t + 1] - V[t] for t in range(N)]
        advantages.append([sum((gamma * lam) ** (k - t) * delta[k]
                               for k in range(t, N)) for t in range(N)])
    return advantages


# %%
def ppo_policy_loss_numpy(logps, old_logps, advantages, epsilon):
    total, count = 0.0, 0
    for i in range(len(logps)):
        for t in range(len(logps[i])):
            w = np.exp(logps[i][t] - old_logps[i][t])
            clipped = min(max(w, 1 - epsilon), 1 + epsilon)
            A = advantages[i][t]
            total += min(w * A, clipped * A)  # (2.29)
            count += 1
    return -total / count


# %%
def ppo_value_loss_numpy(values, old_values, returns, epsilon):
    total, count = 0.0, 0
    for i in range(len(values)):
        for t in range(len(values[i])):
            V, V_old = values[i][t], old_values[i][t]
            clipped = min(max(V, V_old - epsilon), V_old + epsilon)
            R = returns[i][t]
            total += max((V - R) ** 2, (clipped - R) ** 2)
            count += 1
    return 0.5 * total / count


# %%
def whiten_numpy(rows):
    flat = np.concatenate(rows)
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [(np.asarray(row) - mean) / np.sqrt(variance + 1e-8)
            for row in rows]


# %% [markdown]
# 最後の `whiten_numpy` は、TRL が GAE の後に必ず行う **白色化**（全トークンで平均 0、標準偏差 1 にそろえる）です。ここまでの導出にはありません。
#
# パッケージの関数は、同じ式をベクトルで書いた PyTorch 版です。説明文は省いて表示します。入力の検査のあとが式です（ `clipped_surrogate` は、第 5 章の GRPO とも共通です）。

# %%
import inspect

from companion.losses import whiten

for function in (gae, whiten, ppo_policy_loss, clipped_surrogate,
                 ppo_value_loss):
    signature, _, body = inspect.getsource(function).split('"""')
    print(signature.rstrip() + body)

# %% [markdown]
# 長さの違う 6 本の軌跡で、2 つの実装を比べます。古い方策から離しておかないと、クリッピングの誤りは見つかりません。詰め物には、わざと大きな値を入れます。

# %%
rng = np.random.default_rng(0)
sizes = [6, 1, 4, 5, 2, 3]
r_rows, V_rows = ([rng.normal(size=n) for n in sizes] for _ in range(2))
old_rows = [-rng.exponential(1.0, size=n) for n in sizes]
new_rows = [x + rng.normal(0, 0.3, size=len(x)) for x in old_rows]
moved_rows = [x + rng.normal(0, 0.3, size=len(x)) for x in V_rows]


# %%
def padded(rows, filler=99.0):
    table = torch.full((len(rows), max(map(len, rows))), filler).double()
    for i, row in enumerate(rows):
        table[i, :len(row)] = torch.as_tensor(row)
    return table


# %%
mask = padded([[1.0] * n for n in sizes], filler=0.0)

# %%
A_numpy = gae_numpy(r_rows, V_rows, 0.9, 0.8)
A_torch, returns = gae(padded(r_rows), padded(V_rows), mask, 0.9, 0.8)
white_numpy, white = whiten_numpy(A_numpy), whiten(A_torch, mask)
R_rows = [A + V for A, V in zip(A_numpy, V_rows, strict=True)]
for text, rows, table in (("GAE", A_numpy, A_torch),
                          ("目標 Â + V", R_rows, returns),
                          ("白色化", white_numpy, white)):
    claim(f"{text}: NumPy = PyTorch", padded(rows, 0.0), table,
          tol=1e-12)

# %%
epsilon = 0.2
claim("方策の損失: NumPy = PyTorch",
      ppo_policy_loss_numpy(new_rows, old_rows, white_numpy, epsilon),
      ppo_policy_loss(padded(new_rows), padded(old_rows), white, mask,
                      epsilon), tol=1e-12)
claim("価値の損失: NumPy = PyTorch",
      ppo_value_loss_numpy(moved_rows, V_rows, R_rows, epsilon),
      ppo_value_loss(padded(moved_rows), padded(V_rows), returns, mask,
                     epsilon), tol=1e-12)
w = (padded(new_rows) - padded(old_rows)).exp()
stopped = (w > 1.2) & (white > 0) | (w < 0.8) & (white < 0)
check("クリッピングが効いている", stopped.sum() >= 3,
      f"{int(mask.sum())} トークン中 {stopped.sum()} トークン")

# %% [markdown]
# 勾配は、数値微分と比べます（`gradcheck`）。古い方策、アドバンテージ、目標はデータとして扱い、勾配を流しません。

# %%
leaves = [x.requires_grad_() for x in (
    padded(new_rows), padded(old_rows), white.clone(), padded(moved_rows),
    padded(V_rows), returns.clone())]
new, old, A, V_new, V_old, R = leaves
check("方策: 自動微分 = 数値微分", torch.autograd.gradcheck(
    lambda x: ppo_policy_loss(x, old.detach(), A.detach(), mask, epsilon),
    new))
check("価値: 自動微分 = 数値微分", torch.autograd.gradcheck(
    lambda x: ppo_value_loss(x, V_old.detach(), R.detach(), mask, epsilon),
    V_new))

# %%
(ppo_policy_loss(new, old, A, mask, epsilon)
 + ppo_value_loss(V_new, V_old, R, mask, epsilon)).backward()
check("データには勾配が流れない",
      all(x.grad is None for x in (old, A, V_old, R))
      and new.grad.any() and V_new.grad.any())
check("詰め物の勾配は 0",
      not new.grad[mask == 0].any() and not V_new.grad[mask == 0].any())

# %% [markdown]
# 手計算とも合わせておきましょう。報酬は最後に 1、価値は $(0.5,0.6,0.7)$、 $\gamma=1,\ \lambda=0.95$ です。TD 誤差は $(0.1,0.1,0.3)$ なので、後ろから $0.3$、 $0.1+0.95\times0.3=0.385$、 $0.1+0.95\times0.385=0.46575$ です。価値 2 の詰め物を足しても変わりません。

# %%
r_hand, V_hand = double([[0, 0, 1, 0]]), double([[0.5, 0.6, 0.7, 2]])
three_tokens = torch.tensor([[1, 1, 1, 0]])
A_hand, R_hand = gae(r_hand, V_hand, three_tokens, 1.0, 0.95)
claim("Â", A_hand[0], [0.46575, 0.385, 0.3, 0.0])
claim("目標 Â + V", R_hand[0], [0.96575, 0.985, 1.0, 0.0])


# %% [markdown]
# **マスクを忘れると** 、詰め物の価値 2 が「続きがある」と数えられて、値がすっかり変わります。

# %%
A_without, _ = gae(r_hand, V_hand, torch.ones(1, 4), 1.0, 0.95)
gap = (A_without - A_hand)[0, :3].abs()
check("マスクなしでは、どのトークンの値も違う", gap.min() > 0.05,
      "Â = " + "、".join(f"{x:.3f}" for x in A_without[0, :3].tolist()))

# %% [markdown]
# 白色化は、実のトークンが 2 つに満たないと分散が決まらないので、0 を返します。マスクに穴があるときなどは、位置を言って止まります。

# %%
claim("1 トークンの白色化は 0", whiten(double([[3.0, 5.0]]),
                                torch.tensor([[1, 0]])), 0.0)
refused = {
    "穴のあるマスク": (lambda: gae(
        r_hand, V_hand, torch.tensor([[1, 0, 1, 0]])), "mask[0, 2]"),
    "λ > 1": (lambda: gae(r_hand, V_hand, three_tokens, lam=1.2), "lam"),
    "NaN のアドバンテージ": (lambda: ppo_policy_loss(
        r_hand, r_hand, r_hand * torch.nan, three_tokens, 0.2),
        "advantages[0, 0]"),
}
for name, (call, words) in refused.items():
    try:
        call()
        message = "エラーになりません"
    except ValueError as error:
        message = str(error)
    check(name, words in message, message)

# %% [markdown]
# ## TRL との照合
#
# 相手は、TRL 1.12.0 の `trl.experimental.ppo.PPOTrainer` です（1.13.0 からは、ありません）。パッケージの `trl_ppo` は、このトレーナーに一度だけ回答を生成させ、更新を何度か行わせて、TRL が損失に入れた値と、出てきた損失・勾配を、そのまま返します。
# 回答は TRL が自分で生成するので、こちらからは選べません。代わりに、TRL が使った報酬・価値・対数確率をこちらの関数に渡して、その先が一致することを確かめます。PPO のサポートページのコードは、4.4.3 節のノートブックで動かします。

# %%
from companion.oracle import HAS_PPO, trl_ppo

if not HAS_PPO:
    print("SKIPPED: この TRL には PPOTrainer がありません（1.12.0 が最後）。"
          "TRL を使うセルは飛ばします。")

# %% [markdown]
# 方策、参照方策、報酬モデル、価値モデルの 4 つが要ります。どれも、素数の和を覚えた小さなモデル（float64）から作ります。参照方策は、その重みを少し動かしたもの、報酬モデルと価値モデルは、出力の層を 1 つの数に替えたもの（重みは乱数のまま）です。ここでは学習が目的ではないので、それで足ります。

# %%
from companion.lm import load
from companion.training import new_reward_model

policy, tokenizer = load("prime-sums", dtype=torch.float64)
reward_model, value_model = (
    new_reward_model("prime-sums", seed=s).double() for s in (2, 3))


# %%
def nudged(seed):
    lm, _ = load("prime-sums", dtype=torch.float64)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters():
            p += 0.2 * p.std() * torch.randn(p.shape, generator=noise).to(p)
    return lm


# %% [markdown]
# プロンプト 8 つ、2 エポック（同じ回答で 2 回更新します）、 $\epsilon=0.05$ とします。幅を狭くしたのは、2 回目の更新でクリッピングが実際に働くようにするためです。

# %%
import contextlib
import io

LIMITS = (20, 30, 5, 100, 7, 64, 99, 12)
asked = tokenizer([f"{n}未満の素数の合計は？" for n in LIMITS])["input_ids"]
CLIP = 0.05


# %%
def run_trl(**config):
    settings = dict(
        num_ppo_epochs=2, response_length=4, temperature=1.0,
        learning_rate=1e-3, kl_coef=0.05, cliprange=CLIP,
        cliprange_value=CLIP)
    with contextlib.redirect_stdout(io.StringIO()):  # TRL の見出しを消す
        return trl_ppo(policy, nudged(1), reward_model, value_model, asked,
                       tokenizer, **(settings | config))


# %%
run = run_trl() if HAS_PPO else None
if HAS_PPO:
    print("回答の長さ:", run.mask.sum(-1).tolist(),
          " 更新の回数:", len(run.updates))


# %% [markdown]
# TRL の `mask` は回答のトークン、 `value_mask` はその一つ後までを含むマスクです（理由は、このあと見ます）。GAE は後者で、白色化と方策の損失は前者で計算します。
# 古い方策の対数確率だけは、TRL が生成のときの float32 の値を使うので、float64 に直してから渡します。

# %%
def rows_of(table, mask):
    return [row[m].numpy() for row, m in zip(table, mask, strict=True)]


# %%
def compare_advantages(run):
    """GAE と白色化の (NumPy, torch, TRL)。値は全部をつないだもの。"""
    numpy_A = gae_numpy(rows_of(run.rewards, run.value_mask),
                        rows_of(run.values, run.value_mask), 1.0, 0.95)
    torch_A, _ = gae(run.rewards, run.values, run.value_mask, 1.0, 0.95)
    trl_A = run.returns - run.values  # TRL の目標は Â + V
    numpy_white = whiten_numpy([row[:n] for row, n in zip(
        numpy_A, run.mask.sum(-1).tolist(), strict=True)])
    torch_white = whiten(torch.where(run.mask, torch_A, 0.0), run.mask)
    both = run.value_mask, run.mask
    return {
        "GAE": (np.concatenate(numpy_A), torch_A[both[0]], trl_A[both[0]]),
        "白色化": (np.concatenate(numpy_white), torch_white[both[1]],
                run.advantages[both[1]]),
    }


# %%
def compare_losses(update, clip):
    """方策と価値の損失、勾配のノルムと最大差、勾配 0 のトークン。"""
    logps, values = (x.clone().requires_grad_()
                     for x in (update.logps, update.values))
    old, m, vm = update.old_logps.double(), update.mask, update.value_mask
    policy_loss = ppo_policy_loss(logps, old, update.advantages, m, clip)
    value_loss = ppo_value_loss(values, update.old_values, update.returns,
                                vm, clip)
    (policy_loss + 0.1 * value_loss).backward()  # TRL の vf_coef
    gradient = torch.cat([logps.grad, values.grad])
    theirs = torch.cat([update.logps_gradient, update.values_gradient])
    norms = gradient.norm(), theirs.norm(), (gradient - theirs).abs().max()
    by_numpy = (
        ppo_policy_loss_numpy(*(rows_of(x, m) for x in (
            update.logps, old, update.advantages)), clip),
        ppo_value_loss_numpy(*(rows_of(x, vm) for x in (
            update.values, update.old_values, update.returns)), clip))
    ours = policy_loss.detach(), value_loss.detach()
    return by_numpy, ours, norms, (logps.grad == 0)[m]


# %%
table, clipped_tokens = {}, []
if HAS_PPO:
    for name, three in compare_advantages(run).items():
        three = [np.asarray(x) for x in three]
        gap = max(np.abs(three[0] - three[2]).max(),
                  np.abs(three[1] - three[2]).max())
        table[f"{name}（最初のトークン）"] = [*(x[0] for x in three), gap]
    for number, update in enumerate(run.updates, 1):
        by_numpy, ours, norms, stopped = compare_losses(update, CLIP)
        theirs = update.policy_loss, update.value_loss
        for name, *three in zip(("方策の損失", "価値の損失"), by_numpy, ours,
                                theirs, strict=True):
            three = [float(x) for x in three]
            table[f"{name}、更新 {number}"] = [
                *three, max(three) - min(three)]
        table[f"勾配のノルム、更新 {number}"] = [np.nan, *map(float, norms)]
        clipped_tokens.append(int(stopped.sum()))

# %%
parity = pd.DataFrame.from_dict(
    table, orient="index", columns=["NumPy", "torch", "TRL", "最大差"])
if HAS_PPO:
    check("NumPy = torch = TRL", parity["最大差"].max() <= 1e-12,
          f"最大差 {parity['最大差'].max():.0e}")
    check("クリッピングは、1 回目は働かず、2 回目は働く",
          clipped_tokens[0] == 0 < clipped_tokens[1],
          f"勾配 0 のトークン: {clipped_tokens}")
shown = parity.drop(columns="最大差").astype(float).map(
    lambda x: "–" if np.isnan(x) else f"{x:.12f}")
shown.assign(最大差=parity["最大差"].map("{:.0e}".format))

# %% [markdown]
# 更新 1 の方策の損失は、白色化で平均が 0、比が 1 なので、0 のはずです。ちょうど 0 でないのは、古い方策の対数確率が float32 だからです。float64 の値に替えると 0 になります。

# %%
if HAS_PPO:
    first = run.updates[0]
    claim("古い方策も float64 なら 0", ppo_policy_loss(
        first.logps, first.logps, first.advantages, first.mask, CLIP), 0.0)

# %% [markdown]
# ### 式と TRL の違い
#
# 式 (2.29) そのものは同じです。その前後に、違いが四つあります。
#
# **1. アドバンテージは、必ず白色化されます**（報酬の白色化とは違い、止める設定はありません）。全部が正のアドバンテージでも、平均より小さければ負になります。バッチの中での「相対評価」になるということです。

# %%
differences = {}
if HAS_PPO:
    raw = (run.returns - run.values)[run.mask]
    white = run.advantages[run.mask]
    flipped = (raw.sign() != white.sign()).sum().item()
    claim("白色化の後は、平均 0", white.mean(), 0.0)
    claim("　標準偏差 1", white.std(), 1.0, tol=1e-6)
    differences["白色化"] = (
        f"標準偏差 {raw.std():.3f}", f"{white.std():.3f}"
        f"（符号が変わったトークン {flipped}）")
claim("全部正の [1, 2, 3] は、白色化で [−1, 0, 1]",
      whiten(double([[1.0, 2.0, 3.0]]), torch.ones(1, 3)), [[-1.0, 0, 1]],
      tol=1e-7)

# %% [markdown]
# **2. 価値の損失の係数 $c_1$ は 0.1 です**（ `vf_coef` ）。損失はステップ 13 の、クリッピングしたものとの大きいほうの、半分の平均です。エントロピーの項はありません（ $c_2=0$ 。記録されるだけです）。

# %%
if HAS_PPO:
    from trl.experimental.ppo import PPOConfig

    first = run.updates[0]
    vf_coef = PPOConfig(bf16=False, use_cpu=True).vf_coef
    n = first.value_mask.sum()
    by_hand = vf_coef * (first.values - first.returns) / n  # 更新 1 回目
    claim("価値の勾配 = 0.1 (V − R)/トークン数",
          first.values_gradient[first.value_mask],
          by_hand[first.value_mask], tol=1e-12)
    differences["価値の損失の係数 c₁"] = "決まっていない", f"{vf_coef}"

# %% [markdown]
# **3. トークンの平均は、マイクロバッチごとにとります。** 8 行を 4 行ずつの組（マイクロバッチ）に分け、2 組の勾配をためてから更新します（勾配蓄積）。1 つめのマイクロバッチは $w=1$ なので、そのトークンの数を $n$ とすると、対数確率についての TRL の勾配は $-\widehat A_t/(2n)$ のはずです。全体の平均なら、 $n$ の 2 倍ではなく、全部のトークンの数で割ります。

# %%
if HAS_PPO:
    two = run_trl(num_ppo_epochs=1, per_device_train_batch_size=4,
                  gradient_accumulation_steps=2).updates
    first, tokens = two[0], [u.mask.sum().item() for u in two]
    claim("勾配 = −Â/(2n)",
          first.logps_gradient[first.mask],
          -first.advantages[first.mask] / (2 * tokens[0]), tol=1e-6)
    check("マイクロバッチのトークン数が違う", tokens[0] != tokens[1],
          f"{tokens[0]} と {tokens[1]}")
    differences["1 トークンの重み（1 つめの組）"] = (
        f"1/{sum(tokens)}", f"1/{2 * tokens[0]}")

# %% [markdown]
# 長さの差が大きいと、違いも大きくなります。1 トークンの損失が $1$ の組と、 $3,3,3$ の組なら、全体の平均は 2.5、平均の平均は 2 です。

# %%
losses = double([[1, 0, 0], [3, 3, 3]])
counted = torch.tensor([[1, 0, 0], [1, 1, 1]])
same = torch.zeros(2, 3).double()
claim("全体の平均", ppo_policy_loss(same, same, -losses, counted, 0.2), 2.5)
claim("平均の平均", sum(ppo_policy_loss(
    same[i:i + 1], same[i:i + 1], -losses[i:i + 1], counted[i:i + 1], 0.2)
    for i in (0, 1)) / 2, 2.0)

# %% [markdown]
# **4. 最後の得点は、EOS の一つ後に置かれます。** 式 (4.10) では、最後のトークンの上です。一つ後の価値が 0.7 だとすると、上の手計算の最後の $\widehat A$ は、0.3 ではなく $0.95\times(1-0.7)=0.285$ になります。くわしくは 4.4.3 節のノートブックで扱います。

# %%
A_later, _ = gae(double([[0, 0, 0, 1]]), double([[0.5, 0.6, 0.7, 0.7]]),
                 torch.ones(1, 4), 1.0, 0.95)
claim("得点が最後のトークンの上なら", A_hand[0, 2], 0.3)
claim("一つ後なら", A_later[0, 2], 0.285)
if HAS_PPO:
    ended = run.mask.sum(-1) < run.mask.shape[1]
    places = (run.raw_rewards - run.kl_rewards).abs()[ended].argmax(-1)
    claim("TRL の得点の位置（EOS で終わった行）", places,
          run.mask.sum(-1)[ended])
differences["EOS での Â（手計算の例）"] = "0.3", "0.285"

# %%
pd.DataFrame.from_dict(differences, orient="index",
                       columns=["この節の式", "TRL 1.12.0"])

# %% [markdown]
# ## 学習
#
# 数え上げをやめて、本当に歩いて学びます。言語モデルの学習は 4.4.3 節のノートブックに譲り、ここでは NumPy だけで、4×4 のマス目を解きます。
#
# 左上から出発し、右下の宝（ $+1$ ）を目指します。穴（ $-1$ ）に落ちても終わりです。一歩ごとに $-0.02$ かかり、20 歩で時間切れです。床が滑るので、1 割は横へ進みます。方策は、マスごとに上・右・下・左のロジットを並べた表、価値モデルは、マスごとの数の表です。
#
# 方策はマスだけを見て、残りの歩数を見ません。ですから、この価値の表は「真の価値」にはなれません（同じマスでも、残りの歩数で見込みが違うので）。現実の価値モデルと同じく、不完全です。

# %%
MAP = "S..." ".X.." "...." ".X.G"
STEP_COST, HORIZON, SIDE_SLIP = -0.02, 20, 0.1
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # 上、右、下、左

P_grid = np.zeros((16, 4, 16))
for cell, action in product(range(16), range(4)):
    for turn, p in ((0, 1 - SIDE_SLIP), (1, SIDE_SLIP / 2),
                    (-1, SIDE_SLIP / 2)):
        dy, dx = MOVES[(action + turn) % 4]
        # 壁の外へは出ない
        y, x = np.clip((cell // 4 + dy, cell % 4 + dx), 0, 3)
        P_grid[cell, action, 4 * y + x] += p
PRIZE = {"X": -1.0, "G": 1.0}
ENTER_GRID = np.array([PRIZE.get(c, 0.0) for c in MAP]) + STEP_COST
IS_END = np.array([c in PRIZE for c in MAP])

# %% [markdown]
# 学習の良し悪しは、歩いてみた平均ではなく、ベルマン方程式を残り 20 歩分さかのぼった **正確な $J$** で測ります。最善の方策（残りの歩数も見てよいとした上限）と、でたらめな方策の $J$ も計算しておきます。

# %%
def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# %%
def exact_J(theta):
    """theta は (シード, 16, 4)。J は (シード,)。"""
    pi, V = softmax(theta), np.zeros(theta.shape[:2])
    for _ in range(HORIZON):
        after = np.einsum("sat,kt->ksa", P_grid * ~IS_END, V)
        V = (pi * (P_grid @ ENTER_GRID + after)).sum(-1)
    return V[:, 0]


# %%
best = np.zeros(16)
for _ in range(HORIZON):
    best = (P_grid @ ENTER_GRID + (P_grid * ~IS_END) @ best).max(-1)
random_J = exact_J(np.zeros((1, 16, 4)))[0]
print(f"最善の J {best[0]:.3f}、でたらめな方策の J {random_J:.3f}")

# %% [markdown]
# 歩く関数です。16 個の乱数の種（シード）を、まとめて動かします。シードごとに方策も価値も別々で、互いに影響しません。

# %%
SEEDS, EPISODES = 16, 32  # シードの数、1 回の更新で歩く軌跡の数


# %%
def pick(chances, rng):
    """行ごとに一つ選ぶ。"""
    u = rng.random((len(chances), 1))
    return (u > chances.cumsum(-1)[:, :-1]).sum(-1)


# %%
def play(theta, rng):
    """全シードで EPISODES 本ずつ歩く。どの配列も (シード×軌跡, 歩数)。"""
    seed = np.repeat(np.arange(len(theta)), EPISODES)
    pi, s = softmax(theta), np.zeros(len(seed), dtype=int)
    alive, columns = np.ones(len(seed), dtype=bool), []
    for _ in range(HORIZON):
        a = pick(pi[seed, s], rng)
        after = pick(P_grid[s, a], rng)
        columns.append((s, a, ENTER_GRID[after] * alive, alive))
        alive = alive & ~IS_END[after]
        s = np.where(alive, after, 0)
    s, a, r, mask = (np.stack(c, 1) for c in zip(*columns, strict=True))
    return seed[:, None], s, a, r, mask


# %%
rng = np.random.default_rng(0)
tries = []
for _ in range(40):
    *_, r, mask = play(np.zeros((SEEDS, 16, 4)), rng)
    tries.append(r.sum(1))
tries = np.concatenate(tries)
error = tries.std() / np.sqrt(len(tries))
check("歩いた平均は、正確な J と合う",
      abs(tries.mean() - random_J) < 4 * error,
      f"{tries.mean():.3f} ± {error:.3f} と {random_J:.3f}")


# %% [markdown]
# **REINFORCE**（reward-to-go と、学習した価値のベースラインつき）です。勾配は、手で書いたスコアの和です。価値の表は、同じマスから見た $R_t$ の平均へ、半分ずつ近づけます。

# %%
def score_sum(theta, seed, s, a, weights):
    """Σ 重み·∇log π(a|s) を、シードごとに。(シード, 16, 4)"""
    taken, visits = np.zeros_like(theta), np.zeros(theta.shape[:2])
    np.add.at(taken, (seed, s, a), weights)
    np.add.at(visits, (seed, s), weights)
    return taken - visits[..., None] * softmax(theta)


# %%
def fit_values(V, seed, s, target, mask, rate):
    """訪れたマスの価値を、目標の平均へ近づける。"""
    gap, visits = np.zeros_like(V), np.zeros_like(V)
    np.add.at(gap, (seed, s), (target - V[seed, s]) * mask)
    np.add.at(visits, (seed, s), mask.astype(float))
    return V + rate * gap / np.maximum(visits, 1)


# %%
def reinforce(updates, lr, seed=0):
    rng = np.random.default_rng(seed)
    theta, V = np.zeros((SEEDS, 16, 4)), np.zeros((SEEDS, 16))
    history = [exact_J(theta)]
    for _ in range(updates):
        k, s, a, r, mask = play(theta, rng)
        R = r[:, ::-1].cumsum(1)[:, ::-1]  # reward-to-go
        weights = (R - V[k, s]) * mask / EPISODES
        theta = theta + lr * score_sum(theta, k, s, a, weights)
        V = fit_values(V, k, s, R, mask, 0.5)
        history.append(exact_J(theta))
    return np.stack(history, 1), theta, V


# %% [markdown]
# **PPO** は、同じように歩いた後、GAE でアドバンテージを計算し、同じデータで何度か更新します。クリッピングで勾配が消えるのは、四つの場合のうち「もう十分に動いた」二つです。
# 勾配は、REINFORCE と学習率の意味をそろえるために、全トークンの平均ではなく、軌跡 1 本あたりの和にします（ステップ 11）。

# %%
def gae_rows(r, V, mask, lam):
    """漸化式を全部の行でいっせいに（γ = 1）。"""
    A = np.zeros_like(r)
    V_after = A_after = np.zeros(len(r))
    for t in reversed(range(r.shape[1])):
        delta = r[:, t] + V_after - V[:, t]
        A_after = (delta + lam * A_after) * mask[:, t]
        V_after, A[:, t] = V[:, t] * mask[:, t], A_after
    return A


# %%
def log_pi(theta, seed, s, a):
    return np.log(softmax(theta))[seed, s, a]


# %%
def policy_step(theta, batch, A, old, epsilon):
    """クリッピングした目的関数の勾配（軌跡 1 本あたり）。"""
    k, s, a, _, mask = batch
    w = np.exp(log_pi(theta, k, s, a) - old)
    moved = (A > 0) & (w > 1 + epsilon) | (A < 0) & (w < 1 - epsilon)
    return score_sum(theta, k, s, a, w * A * (mask & ~moved) / EPISODES)


# %%
def ppo(updates, lr, epochs, epsilon=0.2, lam=0.95, seed=0):
    """epsilon = math.inf なら、クリッピングなし。"""
    rng = np.random.default_rng(seed)
    theta, V = np.zeros((SEEDS, 16, 4)), np.zeros((SEEDS, 16))
    history = [exact_J(theta)]
    for _ in range(updates):
        batch = k, s, a, r, mask = play(theta, rng)
        A = gae_rows(r, V[k, s], mask, lam)
        target, old = A + V[k, s], log_pi(theta, k, s, a)
        for _ in range(epochs):
            theta = theta + lr * policy_step(theta, batch, A, old, epsilon)
            V = fit_values(V, k, s, target, mask, 0.5 / epochs)
        history.append(exact_J(theta))
    return np.stack(history, 1), theta, V


# %% [markdown]
# 学習の前に、NumPy の GAE と勾配を、パッケージの `gae` と `ppo_policy_loss` の自動微分に合わせておきます。平均のとり方（全トークンか、軌跡あたりか）の分だけ、定数倍します。

# %%
rng = np.random.default_rng(1)
start = rng.normal(size=(1, 16, 4))
batch = k, s, a, r, mask = play(start, rng)
V_rough = rng.normal(size=(1, 16))
A = gae_rows(r, V_rough[k, s], mask, 0.95)
away = start + 0.3 * rng.normal(size=start.shape)
by_numpy = policy_step(away, batch, A, log_pi(start, k, s, a), 0.2)

# %%
rows = [torch.from_numpy(x) for x in (
    r, V_rough[k, s], log_pi(start, k, s, a), mask)]
A_torch, _ = gae(rows[0], rows[1], rows[3], 1.0, 0.95)
leaf = torch.from_numpy(away).requires_grad_()
new_logps = leaf.log_softmax(-1)[k, s, a]
loss = ppo_policy_loss(new_logps, rows[2], A_torch, rows[3], 0.2)
by_torch = -torch.autograd.grad(loss, leaf)[0] * mask.sum() / EPISODES
claim("GAE: NumPy = パッケージ", A, A_torch, tol=1e-12)
claim("勾配: 手で書いた NumPy = 自動微分", by_numpy, by_torch, tol=1e-12)

# %% [markdown]
# 16 シードで、3,200 本ずつ歩きます（100 回の更新 × 32 本）。REINFORCE は学習率 1 と 4 の 2 通り、PPO は学習率 1 で 4 エポックです。

# %%
learned = {
    "REINFORCE（学習率 1）": reinforce(100, 1.0),
    "REINFORCE（学習率 4）": reinforce(100, 4.0),
    "PPO（学習率 1 × 4 エポック）": ppo(100, 1.0, epochs=4),
}

# %%
from companion.plots import spread

walked = EPISODES * np.arange(101)
drawn, (axes,) = figure(1, 3, panel=(3.5, 2.9))
for ax, (name, (history, _, _)), colour in zip(
        axes, learned.items(), COLOURS, strict=False):
    spread(walked, history, ax=ax, colour=colour, title=name,
           xlabel="歩いた軌跡の数")
    ax.axhline(best[0], color=GREY, linestyle=":", linewidth=1)
    ax.set(ylim=(-1.15, 0.95))
axes[0].annotate("最善", (0, best[0] + 0.04), color=GREY)
axes[0].set(ylabel="正確な J（16 シード）")
drawn

# %%
milestone = {}
for name, (history, _, _) in learned.items():
    good = history > 0.6
    first = np.where(good.any(1), EPISODES * good.argmax(1), np.inf)
    milestone[name] = {
        "J が 0.6 に届くまでの軌跡（中央値）": np.median(first),
        "届いたシード": good.any(1).sum(),
        "最後の J（最小）": history[:, -1].min(),
        "最後の J（中央値）": np.median(history[:, -1]),
    }
milestone = pd.DataFrame(milestone).T.astype({"届いたシード": int})
milestone.round(3)

# %%
slow, fast, clipped_run = milestone.iloc[:, 0]
for row in (0, 2):
    check(f"{milestone.index[row]}: 全シードが最善の 9 割まで学ぶ",
          milestone["最後の J（最小）"].iloc[row] > 0.9 * best[0])
check("PPO は、同じ学習率の REINFORCE の半分以下の軌跡で届く",
      clipped_run < 0.5 * slow, f"{clipped_run:.0f} 本と {slow:.0f} 本")
check("学習率を 4 倍にした REINFORCE も、PPO と変わらない速さで届く",
      fast < 1.3 * clipped_run, f"{fast:.0f} 本")

# %% [markdown]
# 同じデータを 4 回使う PPO は、同じ学習率の REINFORCE の半分以下の軌跡で $J=0.6$ に届きました。ただし、この小さな世界では、 **学習率を 4 倍にした REINFORCE も同じくらい速い** のです（シードによっては、途中で止まることがあります。表の「届いたシード」です）。ここでは、「何度も使う」ことは、大きな一歩を踏むことと、あまり変わりませんでした。PPO の側は GAE（ $\lambda=0.95$ ）も使っているので、違いの全部が「何度も使う」ことから来るわけでもありません。違いは、踏みすぎたときに現れます（実験 2 と実験 3 で見ます）。
#
# PPO（シード 0）が学んだ方策を描きます。矢印の長さは、その向きを選ぶ確率です。

# %%
from matplotlib.patches import Rectangle


def draw_policy(ax, theta, title):
    for cell, c in enumerate(MAP):
        y, x = divmod(cell, 4)
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, edgecolor=GREY,
                               facecolor="#DDDDDD" if c == "X" else "none"))
        if c in PRIZE:
            ax.text(x, y, {"X": "穴", "G": "宝"}[c], ha="center",
                    va="center")
            continue
        p, (dy, dx) = softmax(theta)[cell], np.array(MOVES).T
        ax.quiver([x] * 4, [y] * 4, p * dx, p * dy, angles="xy",
                  scale_units="xy", scale=2.2, width=0.012, minlength=0,
                  color=COLOURS[0])
    ax.set(title=title, xlim=(-0.6, 3.6), ylim=(3.6, -0.6), aspect="equal")
    ax.set_axis_off()


# %%
final = learned["PPO（学習率 1 × 4 エポック）"][1][0]
drawn, (axes,) = figure(1, 2, panel=(3.1, 3.0))
draw_policy(axes[0], np.zeros((16, 4)), "学習前（左上から出発）")
draw_policy(axes[1], final, "学習後")
drawn

# %% [markdown]
# ## 実験
#
# 実験 1 は廊下の世界での正確な計算、実験 2 と実験 3 はマス目での学習です。実験 1 は価値のずれ方が 8 通り、実験 2 と実験 3 は 16 シードで、図では線が中央値、帯が最小値から最大値までです。
#
# ### 実験 1：λ は、偏りと分散のどちらをとるか
#
# 廊下の真の価値に、標準偏差 $\sigma$ の乱数を足した不完全な価値モデルを 8 通り作り、GAE による勾配の **偏り**（期待値と $\nabla J$ の距離）と **分散** を、数え上げて正確に計算します。
# $n$ 本の軌跡で見積もるときの誤差の 2 乗の期待値は、（偏り）² + 分散 / n です。

# %%
lams = torch.linspace(0, 1, 21, dtype=torch.float64)
errors_in_V = torch.randn(8, 20, generator=g).double()


# %%
def bias_and_variance(sigma):
    """（偏り）² と分散。どちらも (ずれ方, λ)。"""
    rows = []
    for noise in errors_in_V:
        found = [gae_gradient(hall, hall_theta, V_hall + sigma * noise, lam)
                 for lam in lams.tolist()]
        rows.append([[((mean - gradients["廊下"]) ** 2).sum(), variance]
                     for mean, variance in found])
    return torch.tensor(rows, dtype=torch.float64).movedim(-1, 0)


# %%
SIGMAS = (0.0, 0.3, 1.0)
measured = {sigma: bias_and_variance(sigma) for sigma in SIGMAS}

# %%
drawn, (axes,) = figure(1, 2, panel=(4.3, 3.1))
for sigma, colour in zip(SIGMAS, COLOURS, strict=False):
    bias2, variance = measured[sigma]
    for ax, lines in zip(axes, (bias2.sqrt(), variance), strict=True):
        label, scale = ("", "linear") if ax is axes[0] else (
            f"σ = {sigma:g}", "log")
        spread(lams, lines, label=label, ax=ax, colour=colour, xlabel="λ",
               yscale=scale)
norm = gradients["廊下"].norm()
axes[0].axhline(norm, color=GREY, linestyle=":", linewidth=1)
axes[0].annotate("‖∇J‖", (0.85, norm + 0.01), color=GREY)
axes[0].set(title="偏り（色は右の図と同じ）", ylim=(-0.02, None),
            ylabel="‖E[ĝ] − ∇J‖")
axes[1].set(title="分散（軌跡 1 本、対数目盛り）")
axes[1].set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
axes[1].minorticks_off()
drawn

# %%
claim("価値が正しければ、どの λ でも偏りなし", measured[0.0][0].sqrt(), 0.0)
for sigma in SIGMAS[1:]:
    bias2, variance = measured[sigma]
    claim(f"σ = {sigma}: λ = 1 なら偏りなし", bias2[:, -1].sqrt(), 0.0)
    check("　8 通りすべてで、λ を増やすほど偏りが減る",
          (bias2.diff(dim=1) < 0).all(),
          f"λ = 0 で {bias2[:, 0].sqrt().min():.3f}〜"
          f"{bias2[:, 0].sqrt().max():.3f}")

# %% [markdown]
# 偏りは、教科書のとおり、 $\lambda$ とともに減り、1 で消えます。分散はどうでしょうか。「 $\lambda$ が大きいほど分散が大きい」は、この世界では、価値が正しいときの話でした。

# %%
exact, good, bad = (measured[sigma][1] for sigma in SIGMAS)
check("σ = 0: λ を増やすほど分散が増える", (exact.diff(dim=1) > 0).all(),
      f"{exact[0, 0]:.3f} → {exact[0, -1]:.3f}")
larger = (bad[:, 0] > bad[:, -1]).sum()
check("σ = 1: λ = 0 のほうが λ = 1 より分散の大きいことが多い",
      larger >= 4, f"8 通り中 {larger}")
lowest = lams[good.argmin(dim=1)]
check("σ = 0.3: 分散が最小の λ は、ずれ方によって違う",
      lowest.min() < 0.2 and lowest.max() > 0.5,
      f"{lowest.min():.2f}〜{lowest.max():.2f}")

# %% [markdown]
# $\lambda=0$ の $\delta_t=r_t+V(s_{t+1})-V(s_t)$ には、 $V$ の誤りが一歩ごとにそのまま入ります。その誤りは訪れる状態によって変わるので、偏りだけでなく、分散にもなると考えられます。
#
# では、どの $\lambda$ がよいのでしょうか。軌跡の数 $n$ ごとに、（偏り）² + 分散 / n を最小にする $\lambda$ を求めます。

# %%
many = [4, 16, 64, 256, 1024, 4096]


# %%
def best_lambda(sigma):
    bias2, variance = measured[sigma]
    return torch.stack([lams[(bias2 + variance / n).argmin(dim=1)]
                        for n in many], -1)


# %%
bests = {sigma: best_lambda(sigma) for sigma in SIGMAS}
drawn, ((ax,),) = figure(1, 1, panel=(5.6, 3.1))
for sigma, colour in zip(SIGMAS, COLOURS, strict=False):
    spread(many, bests[sigma], label=f"σ = {sigma:g}", ax=ax, colour=colour,
           title="誤差がいちばん小さい λ", xlabel="軌跡の数 n（対数目盛り）",
           ylabel="λ")
ax.set(xscale="log", ylim=(-0.05, 1.05))
drawn

# %%
medians = {sigma: best.quantile(0.5, dim=0) for sigma, best in bests.items()}
for sigma in SIGMAS[1:]:
    check(f"σ = {sigma}: n が多いほど、最善の λ の中央値は 1 に近い",
          (medians[sigma].diff() >= 0).all() and medians[sigma][-1] > 0.9,
          f"{medians[sigma][0]:.2f} → {medians[sigma][-1]:.2f}")
check("n = 16 では、価値が悪いほど、最善の λ の中央値が大きい",
      medians[0.0][1] < medians[0.3][1] < medians[1.0][1],
      "、".join(f"{m[1]:.2f}" for m in medians.values()))

# %% [markdown]
# この世界では、価値モデルが良いほど、また軌跡が少ないほど、小さな $\lambda$ が得です。軌跡がたくさんあるなら、偏りのない $\lambda=1$ に近づけます。一つの値が、いつでも良いわけではありません。
#
# ### 実験 2：同じデータで更新しつづけると
#
# REINFORCE で少し学んだ方策（30 回の更新の後）から 32 本だけ歩き、その **同じデータ** で 300 回更新します。クリッピングのあるものと、ないもの（ $\epsilon=\infty$ ）です。
# 代理の伸び（データで測った $\mathbb{E}[\sum_t(w_t-1)\widehat A_t]$、クリッピングなし）と、正確な $J$ の伸びを比べます。

# %%
_, theta_30, V_30 = reinforce(30, 1.0)
rng = np.random.default_rng(5)
batch = k, s, a, r, mask = play(theta_30, rng)
A_30 = gae_rows(r, V_30[k, s], mask, 0.95)
old_30, J_30 = log_pi(theta_30, k, s, a), exact_J(theta_30)
print(f"出発点の J の中央値 {np.median(J_30):.2f}")


# %%
def per_seed(values):
    """軌跡 1 本あたりの和を、シードごとに。"""
    kept = np.where(mask, values, 0.0)
    return kept.reshape(SEEDS, -1).sum(-1) / EPISODES


# %%
def keep_updating(epsilon, steps=300):
    theta, rows = theta_30, []
    for _ in range(steps + 1):
        w = np.exp(log_pi(theta, k, s, a) - old_30)
        rows.append((per_seed((w - 1) * A_30), exact_J(theta) - J_30,
                     per_seed(np.abs(w - 1) > 0.2) / per_seed(mask)))
        theta = theta + policy_step(theta, batch, A_30, old_30, epsilon)
    names = "代理の伸び", "本当の伸び", "区間の外の割合"
    return {name: np.stack(column, -1) for name, column in zip(
        names, zip(*rows, strict=True), strict=True)}


# %%
kept_on = {"クリッピングなし": keep_updating(math.inf),
           "クリッピングあり": keep_updating(0.2)}

# %%
drawn, (axes,) = figure(1, 3, panel=(3.6, 3.0))
for ax, name in zip(axes, ("代理の伸び", "本当の伸び", "区間の外の割合"),
                    strict=True):
    for label, colour in zip(kept_on, COLOURS[1::-1], strict=True):
        spread(range(301), kept_on[label][name], ax=ax, colour=colour,
               label=label[-2:], title=name, xlabel="更新回数（対数目盛り）")
    ax.set(xscale="symlog", xlim=(0, 300))
axes[1].axhline(0, color=GREY, linewidth=0.8)
drawn

# %%
free, held = kept_on["クリッピングなし"], kept_on["クリッピングあり"]
grown, lost = free["代理の伸び"][:, 300], free["本当の伸び"][:, 300]
median = np.median(free["代理の伸び"], axis=0)
check("なし: 代理の中央値は、300 回の間、増えつづける",
      (np.diff(median) > 0).all())
peak = np.median(free["本当の伸び"], axis=0).max()
check("なし: 本当の伸びの中央値は、いったん上がる", peak > 0.03,
      f"最大 {peak:+.2f}")
check("なし: 代理は、全シードで伸びた",
      grown.min() > 0.1 and np.median(grown) > 0.5,
      f"中央値 {np.median(grown):+.2f}、最小 {grown.min():+.2f}")
check("なし: 本当の J は、半分以上のシードで大きく落ちた",
      (lost < -0.3).sum() >= 8,
      f"中央値 {np.median(lost):+.2f}、最小 {lost.min():+.2f}、"
      f"0.3 以上落ちたのは {(lost < -0.3).sum()} シード")

# %%
safe = held["本当の伸び"][:, 300]
check("あり: 中央値は上がり、いちばん悪いシードでも落ち方が小さい",
      np.median(safe) > 0.02 and safe.min() > -0.4,
      f"中央値 {np.median(safe):+.2f}、最小 {safe.min():+.2f}")
gap = np.abs(free["本当の伸び"][:, 4] - held["本当の伸び"][:, 4])
check("4 回までなら、あってもなくても、あまり変わらない",
      np.median(gap) < 0.02, f"差の中央値 {np.median(gap):.3f}")
outside = held["区間の外の割合"][:, 300]
check("ありでも、比は区間の外へ出る", outside.min() > 0.05,
      f"{outside.min():.0%}〜{outside.max():.0%} の行動")

# %% [markdown]
# クリッピングがないと、代理の伸びは、300 回の間、増えつづけます。32 本の偶然に合わせて、たまたま良かった行動の確率を 1 に近づけていくためと考えられます。本当の $J$ の中央値は、はじめは少し上がり、やがて大きく落ちます。
# クリッピングがあると、得になる分が $w=1+\epsilon$ （ $\widehat A<0$ なら $1-\epsilon$ ）で頭打ちになるので、それ以上は攻めません。ただし、比はかなりの割合で区間の外にあります。一つのロジットを動かせば、同じマスのほかの行動の比も動きます。信頼領域のような保証はない、というステップ 12 のとおりです。
#
# ### 実験 3：エポック数と、クリッピング
#
# はじめから学習します。1 回歩くごとに何エポック更新するかを変えて、30 回歩いた後の $J$ を比べます。

# %%
EPOCHS = (1, 3, 10, 30, 100)
ends = {label: np.stack([
    ppo(30, 1.0, epochs, epsilon)[0][:, -1] for epochs in EPOCHS], -1)
    for label, epsilon in (("クリッピングなし", math.inf),
                           ("クリッピングあり", 0.2))}

# %%
drawn, ((ax,),) = figure(1, 1, panel=(5.6, 3.2))
for label, colour in zip(ends, COLOURS[1::-1], strict=True):
    spread(EPOCHS, ends[label], label=label, ax=ax, colour=colour,
           title="30 回歩いた後の J（16 シード）",
           xlabel="1 回歩くごとのエポック数（対数目盛り）", ylabel="正確な J")
ax.axhline(best[0], color=GREY, linestyle=":", linewidth=1)
ax.set(xscale="log", ylim=(-0.6, 0.9))
drawn

# %%
free, held = ends["クリッピングなし"], ends["クリッピングあり"]
claim("1 エポックなら、まったく同じ（w = 1 なので）", free[:, 0], held[:, 0])
check("100 エポック: ありなら、全シードで学ぶ",
      held[:, -1].min() > 0.6,
      f"{held[:, -1].min():.2f}〜{held[:, -1].max():.2f}")
check("100 エポック: なしでは、学べないシードがある",
      (free[:, -1] < 0.3).sum() >= 3,
      f"{free[:, -1].min():.2f}〜{free[:, -1].max():.2f}、"
      f"0.3 未満が {(free[:, -1] < 0.3).sum()} シード")

# %%
ten = free[:, 2] - held[:, 2]
check("10 エポックの中央値は、なしのほうが、わずかに良い",
      np.median(ten) > 0.005,
      f"なし − あり の中央値 {np.median(ten):+.3f}")
check("　ただし、いちばん悪いシードは、ないほうが悪い",
      free[:, 2].min() < held[:, 2].min() - 0.05,
      f"なし {free[:, 2].min():.2f}、あり {held[:, 2].min():.2f}")

# %% [markdown]
# クリッピングは、学習を速くする工夫ではありませんでした。10 エポックでは、ないほうが、中央値ではわずかに良いくらいです（この世界、この学習率では）。ただし、いちばん悪いシードは、そこですでに、ないほうが悪くなっています。効き目は、 **踏みすぎたときに壊れにくい** ことにあります。エポック数を細かく選ばなくても、そこそこ学べます。PPO が広く使われてきた理由の一つは、これだと考えられます。
#
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/2.3.5.2-ppo-clip.ipynb](exercises/2.3.5.2-ppo-clip.ipynb) で、GAE とクリッピングの損失を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **分散の増える世界** ステップ 4 の「前払い」で、受け取りを $+2$ にすると、 $R(\tau)$ と $R_t$ の分散はそれぞれいくつになるでしょうか。手で計算してから確かめてください。
# 3. **白色化** 学習の `ppo` で、 `A` を全トークンで白色化してください（シードごとに）。学習は速くなるでしょうか。学習率 0.25 や 4 では、どうでしょうか。
# 4. **ε を変える** 実験 3 の 100 エポックで、 $\epsilon$ を 0.05、0.5、1 にしてください。壊れはじめるのは、どこからでしょうか。
# 5. **止まりどき** 実験 2 で、KL が 0.1 を超えたら更新をやめることにします（early stopping）。クリッピングの代わりになるでしょうか。
#
# ## 参考文献
#
# - Schulman, Wolski, Dhariwal, Radford, Klimov. Proximal Policy Optimization Algorithms. 2017. [arXiv:1707.06347](https://arxiv.org/abs/1707.06347) PPO の論文です。ステップ 12〜15 はこの論文に沿っています。
# - Schulman, Moritz, Levine, Jordan, Abbeel. High-Dimensional Continuous Control Using Generalized Advantage Estimation. 2016. [arXiv:1506.02438](https://arxiv.org/abs/1506.02438) GAE の論文です（ステップ 7〜10）。
# - Schulman, Levine, Moritz, Jordan, Abbeel. Trust Region Policy Optimization. 2015. [arXiv:1502.05477](https://arxiv.org/abs/1502.05477) 代理の目的関数と信頼領域（ステップ 11・12・15）。
# - Kakade, Langford. Approximately Optimal Approximate Reinforcement Learning. ICML 2002. ステップ 11 の性能差の等式。
# - Williams. Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning. Machine Learning 8, 1992. REINFORCE の論文です（ステップ 2・3・5）。
# - Greensmith, Bartlett, Baxter. Variance Reduction Techniques for Gradient Estimates in Reinforcement Learning. JMLR 5, 2004. ステップ 5 の最適なベースライン。
# - Nota, Thomas. Is the Policy Gradient a Gradient? 2020. [arXiv:1906.07073](https://arxiv.org/abs/1906.07073) ステップ 4 の $\gamma^t$ の話。
# - Huang ほか. The N+ Implementation Details of RLHF with PPO. 2024. [arXiv:2403.17031](https://arxiv.org/abs/2403.17031) 白色化や価値のクリッピングなど、TRL の実装のもとになった細部。
# - TRL 1.12.0 `PPOTrainer`（`trl/experimental/ppo/ppo_trainer.py`）。
