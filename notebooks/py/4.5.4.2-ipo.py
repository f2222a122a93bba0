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
# # 4.5.4.2 IPO：選好の確率を、そのまま最大化する
#
# 本書 4.5.4.2 節の IPO（identity preference optimization）を扱います。論文は Azar ほか（2023、[arXiv:2310.12036](https://arxiv.org/abs/2310.12036)）です。
#
# DPO は、選好が Bradley–Terry モデルに従うと考えて、報酬の差を方策で表しました。ところが、一方の回答が「いつでも」好まれると、その報酬の差は無限大になり、DPO の損失には最小点がなくなります。
# IPO は、報酬の差ではなく選好の確率そのものを最大化することで、これを避けます。
# このノートブックでは、IPO の損失が出てくるまでの各ステップを小さな世界で実行し、TRL の `DPOTrainer(loss_type="ipo")` と値・勾配が一致することを確かめ、IPO がどこで止まるのか、そして、止まる場所が何に左右されるのかを目で見ます。
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
# | $x$ | `prompt` | – | `prompt` |
# | $y_w,\ y_\ell$ （好まれた回答、好まれなかった回答） | `chosen`, `rejected` | – | `chosen`, `rejected` |
# | $\log\pi_\theta(y_w\mid x),\ \log\pi_\theta(y_\ell\mid x)$ | `chosen_logps`, `rejected_logps` | (B,) | `chosen_logps`, `rejected_logps` |
# | $\log\pi_{\mathrm{ref}}(y_w\mid x),\ \log\pi_{\mathrm{ref}}(y_\ell\mid x)$ | `ref_chosen_logps`, `ref_rejected_logps` | (B,) | 同じ |
# | $\beta$ （KL 正則化の係数。論文では $\tau$ ） | `beta` | – | `beta` |
# | $P(y\succ y'\mid x)$ （ $y$ が $y'$ より好まれる確率） | `P` | (X, Y, Y) | – |
# | $\mu(y\mid x)$ （対の回答を引く分布） | `mu` | (X, Y) | – |
# | $p(y\succ\mu\mid x)$ （ $\mu$ から引いた相手に $y$ が勝つ確率） | `wins` | (X, Y) | – |
# | $h(y)=\log\frac{\pi(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}$ （対数確率比） | `h` | (X, Y) | – |
# | $\lvert y\rvert$ （回答のトークン数。EOS も数えます） | `chosen_lengths`, `rejected_lengths` | (B,) | – |
#
# B は対の数、X はプロンプトの数、Y は回答の数です。対数確率は、断りがなければ、EOS を含む回答のトークンについての **和** です。単位は nat です。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 4.5.1 節のノートブックと同じ、とても小さな言語を使います。文字は a と b の 2 つ、回答は最長 3 トークンで、EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。
# 打ち切られた回答も立派な回答なので、確率の和はちょうど 1 です。期待値はどれも有限の和になり、等式の両辺を float64 で計算して比べられます。

# %%
from companion.exact import World

world = World(prompts=2, letters=2, max_length=3)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# 方策は、プロンプトと、それまでに書いた文字列ごとに、次のトークンのロジットを並べた表です（表形式の方策）。参照方策のロジットは、乱数で決めます。
#
# 選好の確率 $P(y\succ y'\mid x)$ も、乱数で決めます。満たすのは $P(y\succ y')+P(y'\succ y)=1$ だけです。
# Bradley–Terry モデルに従うとは考えません。「a は b に勝ち、b は c に勝ち、c は a に勝つ」ような循環があってもかまいません。

# %%
g = torch.Generator().manual_seed(0)
ref_logps = world.log_probs(world.random_logits(g))  # (X, Y)

P = torch.rand(2, 15, 15, generator=g, dtype=torch.float64)
P = (P + 1 - P.mT) / 2
claim("P(y≻y') + P(y'≻y) = 1", P + P.mT, torch.ones(()))

# %% [markdown]
# ### ステップ 1：ΨPO の目的関数
#
# 論文の出発点は、報酬ではなく、選好の確率から作った目的関数です。増加関数 $\Psi$ を一つ選び、プロンプト $x$ ごとに、次の値を最大にします（ $\beta>0$ とします）。
#
# $$
# J_\Psi(\pi)=\mathbb{E}_{y\sim\pi(\cdot\mid x)}\,\mathbb{E}_{y'\sim\mu(\cdot\mid x)}\bigl[\Psi(P(y\succ y'\mid x))\bigr]-\beta D_{\mathrm{KL}}[\pi(\cdot\mid x)\|\pi_{\mathrm{ref}}(\cdot\mid x)]
# $$
#
# $\mu$ は、比べる相手を引く分布です。学習中は動きません。ここでは $\mu=\pi_{\mathrm{ref}}$ としますが、式はどんな $\mu$ でも同じです。
#
# $\Psi$ を恒等関数にしたものが IPO です。 $y$ が $\mu$ の回答に勝つ確率を
#
# $$
# p(y\succ\mu\mid x)=\mathbb{E}_{y'\sim\mu(\cdot\mid x)}[P(y\succ y'\mid x)]
# $$
#
# と書くと、目的関数は $\mathbb{E}_{y\sim\pi}[p(y\succ\mu)]-\beta D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]$、つまり式 (4.9) で、報酬の場所に勝率 $p(y\succ\mu)$ を置いたものです。
#
# **主張** だから、最大にするのは、参照方策を勝率の指数で傾けた方策です。
#
# $$
# \pi^*(y\mid x)\propto\pi_{\mathrm{ref}}(y\mid x)\exp\left(\frac{p(y\succ\mu\mid x)}{\beta}\right)
# $$

# %%
from companion.exact import expect, kl, tilt

beta = 0.1
mu = ref_logps.exp()
wins = (P * mu[:, None, :]).sum(-1)  # p(y≻μ)
star_logps = tilt(ref_logps, wins / beta)


# %%
def J(logps):
    return expect(logps.exp(), wins) - beta * kl(logps, ref_logps)


logps_200 = world.log_probs(world.random_logits(g, 200))  # (200, X, Y)
shortfall = beta * kl(logps_200, star_logps)
claim("J(π*) − J(π) = β KL(π‖π*)", J(star_logps) - J(logps_200), shortfall)

# %% [markdown]
# 不足分 $\beta D_{\mathrm{KL}}[\pi\|\pi^*]$ は、 $\pi=\pi^*$ のときにだけ 0 になります。だから最大点は $\pi^*$ だけです（4.5.1 節のステップ 1 と同じ議論です）。
#
# ### ステップ 2：Ψ をロジットにすると、RLHF と DPO になる
#
# $\Psi(q)=\log\frac{q}{1-q}$ （ロジット）にしてみます。選好が、ある報酬 $r$ の Bradley–Terry モデル $P=\sigma(r(y)-r(y'))$ に従うなら、 $\Psi(P(y\succ y'))=r(y)-r(y')$ です。相手について平均すると、
#
# $$
# \mathbb{E}_{y'\sim\mu}[\Psi(P(y\succ y'))]=r(y)-\mathbb{E}_{y'\sim\mu}[r(y')]
# $$
#
# となり、報酬に定数を足しただけです。だから最大点は RLHF や DPO と同じ $\pi_{\mathrm{ref}}\exp(r/\beta)$ です（正規化は省きました）。

# %%
from companion.exact import bradley_terry

rewards = world.random_rewards(g)
P_bt = bradley_terry(rewards)
mean_psi = (mu[:, None, :] * P_bt.logit()).sum(-1)
claim("E[Ψ(P)] = r − E[r]", mean_psi,
      rewards - expect(mu, rewards)[:, None])
claim("最大点は RLHF と同じ", tilt(ref_logps, mean_psi / beta),
      tilt(ref_logps, rewards / beta))

# %% [markdown]
# 2 つの $\Psi$ の違いは、 $P$ が 1 に近いところに現れます。ロジットは無限大に発散し、恒等関数は 1 で止まります。
# 回答が 2 つだけなら、最大点での対数確率比の差 $h(y_1)-h(y_2)$ は、 $p=P(y_1\succ y_2)$ で書けます。 $\Psi$ がロジットなら $\frac1\beta\log\frac{p}{1-p}$、恒等関数なら（ステップ 5 で見るように） $\frac{2p-1}{2\beta}$ です。

# %%
from companion.plots import COLOURS, GREY, figure

win_rates = torch.linspace(0.5, 0.9999, 2000, dtype=torch.float64)
optimal = {"DPO（ロジット）": win_rates.logit() / beta,
           "IPO（恒等関数）": (2 * win_rates - 1) / (2 * beta)}
drawn, ((ax,),) = figure(panel=(5.6, 3.1))
for colour, (name, gap) in zip(COLOURS, optimal.items(), strict=False):
    ax.plot(win_rates, gap, color=colour, label=name)
ax.set(xlabel="$P(y_1\\succ y_2)$", ylabel="$h(y_1)-h(y_2)$（nat）",
       title="回答が 2 つのときの最大点（β = 0.1）", ylim=(0, 60))
ax.legend()
drawn

# %%
certain = torch.tensor([0.9, 0.99, 0.999], dtype=torch.float64)
by_logit = certain.logit() / beta
by_identity = (2 * certain - 1) / (2 * beta)
check("DPO は伸びつづけ、IPO は 1/(2β) = 5 を超えない",
      by_logit[2] > 60 and (by_identity < 5).all(),
      f"DPO {by_logit.numpy().round(1)}、IPO {by_identity.numpy().round(2)}")

# %% [markdown]
# $\beta$ を変えても、DPO の発散は止まりません。 $P=1$ なら、どんな $\beta$ でも無限大です。
#
# $\mu$ から独立に相手を引く IPO の最大点 $\pi^*$ では、対数確率比の差は決して $1/\beta$ を超えません。 $p(y\succ\mu)$ は 0 から 1 の間にあるからです（ステップ 5 のように対の引き方を変えると、この上限は成り立ちません）。

# %%
h_star = star_logps - ref_logps
largest = (h_star[:, :, None] - h_star[:, None, :]).max()
check("h(y) − h(y') は 1/β 未満", largest < 1 / beta,
      f"最大 {largest:.2f}、1/β = {1 / beta:.0f}")

# %% [markdown]
# ### ステップ 3：最大点を、方程式の解として書く
#
# $\pi^*$ の式の対数をとり、2 つの回答の差をとると、正規化の定数が消えます。
#
# $$
# h(y)-h(y')=\frac{p(y\succ\mu)-p(y'\succ\mu)}{\beta}\qquad\text{（すべての }y,y'\text{ について）}
# $$
#
# （ $\mu$ は、どの回答にも正の確率を与えるとします。）この連立方程式の解は $\pi^*$ だけです。 $h$ の差がすべて決まれば、残るのは $y$ によらない定数で、それは確率の和が 1 であることから決まるからです。
# 両辺の食い違いを 2 乗して、 $\mu$ から独立に引いた 2 つの回答について平均すれば、最小化の問題になります。

# %%
def differences_of(values):
    return values[..., :, None] - values[..., None, :]


def equation_loss(logps):
    gap = differences_of(logps - ref_logps) - differences_of(wins) / beta
    return (mu[:, :, None] * mu[:, None, :] * gap**2).sum((-2, -1))


claim("π* では 0", equation_loss(star_logps), torch.zeros(2))
others = equation_loss(logps_200)
check("200 個の方策では正", others.min() > 0, f"最小 {others.min():.1f}")

# %% [markdown]
# ### ステップ 4：選好データの回帰へ
#
# $p(y\succ\mu)$ は観測できません。観測できるのは、2 つの回答のどちらが好まれたか、という一回ごとの結果です。
# $y$ が好まれたら 1、そうでなければ 0 になる変数を $I$ と書き、勝率の差を $I$ に置き換えます。
#
# $$
# \mathbb{E}_{y,y'\sim\mu}\,\mathbb{E}_{I\sim\mathrm{Bern}(P(y\succ y'))}\left[\left(h(y)-h(y')-\frac{I}{\beta}\right)^2\right]
# $$
#
# 一回ごとの $I$ の期待値は $P(y\succ y')$ で、 $p(y\succ\mu)-p(y'\succ\mu)$ とは違います。それでも、 $y$ と $y'$ が同じ $\mu$ から **独立に** 引かれるなら、違いは方策によらない定数だけです。
# 2 乗を展開して $h$ の 1 次の項を比べると、どちらも $-\frac{2}{\beta}\mathbb{E}_{y\sim\mu}\left[h(y)(2p(y\succ\mu)-1)\right]$ になります。

# %%
W = mu[:, :, None] * mu[:, None, :]  # 対 (y, y') が引かれる確率


def label_loss(logps, W):
    gap = differences_of(logps - ref_logps)
    won, lost = (gap - 1 / beta) ** 2, gap**2
    return (W * (P * won + (1 - P) * lost)).sum((-2, -1))


excess = label_loss(logps_200, W) - label_loss(star_logps, W)
claim("ラベルの損失の超過分 = 方程式の損失", excess, others)

# %% [markdown]
# 独立に引かないと、一般には $\pi^*$ は最小点になりません。対の引き方を、独立でない $W(y,y')$ に変えてみます。順番には意味がないので $W(y,y')=W(y',y)$ です。
# $\mu$ には、 $W$ から出てくる回答の分布（周辺分布） $\mu(y)=\sum_{y'}W(y,y')$ を使います。乱数で 5 通り作ると、その $\mu$ についての $\pi^*$ よりも損失の小さい方策が見つかります（ $\pi^*$ から、損失の勾配の逆向きに少し動いた方策です）。

# %%
W_5 = torch.rand(5, 2, 15, 15, generator=g, dtype=torch.float64)
W_5 = (W_5 + W_5.mT) / 2
W_5 = W_5 / W_5.sum((-2, -1), keepdim=True)

# %%
own_wins = (P * W_5.sum(-1)[..., None, :]).sum(-1)  # μ は W の周辺分布
theta = world.logits_of(tilt(ref_logps, own_wins / beta)).requires_grad_()
loss = label_loss(world.log_probs(theta), W_5)
(gradient,) = torch.autograd.grad(loss.sum(), theta)
lower = label_loss(world.log_probs(theta.detach() - 0.1 * gradient), W_5)
check("独立でなければ、π* は最小点ではない", (lower < loss).all(),
      f"損失は {(loss - lower).min():.4f} 以上減る")

# %% [markdown]
# 最後に、 $(y,y',I)$ と、入れ替えた $(y',y,1-I)$ を平均します。好まれたほうから見た差を $\Delta=h(y_w)-h(y_\ell)$ とすると、 $\frac12\bigl[(\Delta-\frac1\beta)^2+\Delta^2\bigr]=(\Delta-\frac1{2\beta})^2+\frac1{4\beta^2}$ です。好まれたほうを $y_w$、好まれなかったほうを $y_\ell$ と書くと、これが IPO の損失です（論文の式 17）。
#
# $$
# \mathcal{L}_{\mathrm{IPO}}(\theta)=\mathbb{E}_{(x,y_w,y_\ell)}\left[\left(\log\frac{\pi_\theta(y_w\mid x)}{\pi_{\mathrm{ref}}(y_w\mid x)}-\log\frac{\pi_\theta(y_\ell\mid x)}{\pi_{\mathrm{ref}}(y_\ell\mid x)}-\frac{1}{2\beta}\right)^2\right]
# $$
#
# 好まれたほうの対数確率比が、好まれなかったほうより、ちょうど $\frac{1}{2\beta}$ だけ大きくなるようにする、という回帰です。
# 2 つの損失の差は、方策によらず $\frac{1}{4\beta^2}$ です。こちらの等式には、独立に引くことは要りません。 $W$ が対称ならよいのです。

# %%
def population_loss(logps, W, P):
    """IPO の損失。対 (y_w, y_l) の確率は 2 W(y_w, y_l) P(y_w ≻ y_l)。"""
    gap = differences_of(logps - ref_logps)
    return (2 * W * P * (gap - 1 / (2 * beta)) ** 2).sum((-2, -1))


for name, some_W in (("独立", W), ("5 通りの W", W_5[:, None])):
    gap_of_losses = (label_loss(logps_200, some_W)
                     - population_loss(logps_200, some_W, P))
    claim(f"{name}: 2 つの損失の差 = 1/(4β²)",
          gap_of_losses, 1 / (4 * beta**2))

# %% [markdown]
# ### ステップ 5：最小点はどこか
#
# 今度は、対の引き方を、対称な $W(y,y')$ 一般にします。損失は $h$ の差だけで決まるので、確率の和が 1 という条件は忘れて $h$ で微分し、0 とおくと、どの回答 $y$ についても
#
# $$
# \sum_{y'}W(y,y')\left[h(y)-h(y')-\frac{2P(y\succ y')-1}{2\beta}\right]=0
# $$
#
# です。連立一次方程式なので、擬似逆行列で解けます。対 $(y,y')$ だけを見れば差は $\frac{2P-1}{2\beta}$ になりたいのですが、すべての対の言い分を同時には通せないとき、 $W$ で重みづけた最小二乗で折り合いをつけるのです。

# %%
def least_squares(W, P, beta):
    """IPO の最小点の h（定数を足す自由は、平均を 0 にして決める）。"""
    wanted = (2 * P - 1) / (2 * beta)
    laplacian = torch.diag_embed(W.sum(-1)) - W
    return (torch.linalg.pinv(laplacian)
            @ (W * wanted).sum(-1, keepdim=True)).squeeze(-1)


h = least_squares(W, P, beta)
claim("独立に引くなら [p(y≻μ) − p(y'≻μ)]/β",
      differences_of(h), differences_of(wins) / beta)

# %% [markdown]
# **主張** 表形式の方策（ $h$ の差を自由に決められる方策）なら、損失の超過分は、対数確率比の差の食い違いの 2 乗を、対の確率で平均したものです。
#
# $$
# \mathcal{L}(\pi)-\mathcal{L}(\pi^*)=\sum_{y,y'}W(y,y')\bigl[(h(y)-h(y'))-(h^*(y)-h^*(y'))\bigr]^2
# $$
#
# 負になることはなく、0 になるのは、対に現れるすべての $y,y'$ で差が一致したときだけです。だから、すべての回答が対で（間接的にでも）つながっていれば、最小点は一つです。 $P$ が 0 や 1 でもかまいません。
# 先ほどの 5 通りの $W$ で確かめます。 $P$ も、0 か 1 だけの決定的なものにします。

# %%
P_sure = (P > 0.5).double()
P_sure.diagonal(dim1=-2, dim2=-1).fill_(0.5)
h_5 = least_squares(W_5, P_sure, beta)
star_5 = tilt(ref_logps, h_5)

# %%
theta = world.logits_of(star_5).requires_grad_()
loss = population_loss(world.log_probs(theta), W_5, P_sure).sum()
(gradient,) = torch.autograd.grad(loss, theta)
claim("どの W でも ∇L = 0", gradient, torch.zeros(()), tol=1e-12)

# %%
best = population_loss(star_5, W_5, P_sure)[:, None]
excess = population_loss(logps_200, W_5[:, None], P_sure) - best
off = differences_of(logps_200 - ref_logps) - differences_of(h_5)[:, None]
claim("L(π) − L(π*) = Σ W（差の食い違い）²",
      excess, (W_5[:, None] * off**2).sum((-2, -1)))
check("200 個の方策の超過分は正", excess.min() > 0,
      f"最小 {excess.min():.1f}")

# %% [markdown]
# 小さな例で、数を見ておきましょう（ $\beta=0.1$ ）。
#
# - **回答が 2 つ**： $y_1$ が好まれる確率が $p$ なら、差は $\frac{2p-1}{2\beta}$。対の引き方によりません。
# - **回答が K 個で、優劣が完全に決まっていて、対は一様**：隣どうしの差は $\frac{1}{K\beta}$、両端の差は $\frac{K-1}{K\beta}$。3 つなら 3.333 と 6.667。
# - **3 つで、隣どうしの対 (1, 2) と (2, 3) だけ**：5、5、両端は 10。

# %%
def total_order(K):
    """1 番が 2 番に、2 番が 3 番に、…、必ず勝つ。"""
    return torch.ones(K, K).double().triu(1) + torch.eye(K).double() / 2


def uniform_pairs(K):
    return torch.full((K, K), 1 / K**2, dtype=torch.float64)


# %%
for p in (1.0, 0.8):
    two_P = torch.tensor([[0.5, p], [1 - p, 0.5]], dtype=torch.float64)
    W_2 = torch.tensor([[0.1, 0.3], [0.3, 0.3]], dtype=torch.float64)
    h = least_squares(W_2, two_P, 0.1)
    claim(f"2 つ、p = {p}: (2p − 1)/(2β)", h[0] - h[1], (2 * p - 1) / 0.2)

# %%
for K in (3, 6):
    h = least_squares(uniform_pairs(K), total_order(K), 0.1)
    claim(f"{K} つの隣どうし: 1/(Kβ)", h[:-1] - h[1:],
          1 / (K * 0.1))
    claim(f"{K} つの両端: (K−1)/(Kβ)", h[0] - h[-1], (K - 1) / (K * 0.1))

# %%
W_chain = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).double() / 4
h = least_squares(W_chain, total_order(3), 0.1)
claim("対が (1,2) と (2,3) だけ", [h[0] - h[1], h[1] - h[2], h[0] - h[2]],
      [5.0, 5.0, 10.0])

# %% [markdown]
# 同じ回答を 2 回引いた対（ $y=y'$ ）は、損失に定数を足すだけなので、除いて数えても最小点は変わりません。
#
# ### ステップ 6：IPO の答えは、対の引き方で変わる
#
# 上の、回答が 3 つの 2 つの例では、選好はまったく同じなのに、対の引き方を変えただけで、両端の差が 6.667 から 10 に変わりました。
# $p(y\succ\mu)$ は「どんな相手と比べたか」に左右されるのですから、当然とも言えます。
# 一方、DPO の最小点は、ラベルが Bradley–Terry モデルに従い、すべての回答が対でつながっているなら、対の引き方によりません（4.5.1 節のステップ 4）。同じ 5 通りの $W$ で、両方を並べます。

# %%
from torch.nn.functional import logsigmoid


def dpo_population_loss(logps, W):
    margins = beta * differences_of(logps - ref_logps)
    return -(2 * W * P_bt * logsigmoid(margins)).sum((-2, -1))


theta = world.logits_of(tilt(ref_logps, rewards / beta))
theta = theta.expand(5, -1, -1, -1).clone().requires_grad_()
loss = dpo_population_loss(world.log_probs(theta), W_5).sum()
(gradient,) = torch.autograd.grad(loss, theta)
claim("DPO: どの W でも、同じ π* で ∇L = 0",
      gradient, torch.zeros(()), tol=1e-12)

# %%
h_ipo = least_squares(W_5, P_bt, beta)
h_ipo = h_ipo - h_ipo[..., :1]  # 1 つ目の回答を基準にそろえる
moved = (h_ipo - h_ipo[0]).abs().amax((1, 2))[1:]
check("IPO: 最小点は W ごとに違う", moved.min() > 0.05,
      f"h の違い（最大）{moved.numpy().round(2)}")

# %% [markdown]
# ### ステップ 7：勾配を読む
#
# 一つの対についての勾配は、 $\Delta=h(y_w)-h(y_\ell)$ と書けば、次のようになります。
#
# $$
# \nabla_\theta\mathcal{L}=-2\left(\frac{1}{2\beta}-\Delta\right)\bigl(\nabla_\theta\log\pi_\theta(y_w\mid x)-\nabla_\theta\log\pi_\theta(y_\ell\mid x)\bigr)
# $$
#
# 重み $2(\frac{1}{2\beta}-\Delta)$ は、学習の始まり（ $\Delta=0$ ）で $\frac1\beta$、 $\Delta=\frac{1}{2\beta}$ で 0、そこを過ぎると **負** になり、差を縮めるほうへ引き戻します。
# DPO の重み $\beta\,\sigma(-\beta\Delta)$ は、始まりで $\frac\beta2$、いくら $\Delta$ が大きくなっても正のままです。 学習の始まりでは、 $\beta$ を小さくすると、DPO の重みは小さくなり、IPO の重みは大きくなることにも注意しましょう。次の図は、左右で縦軸の目盛りが違います。

# %%
from companion.losses import dpo_loss, ipo_loss


def weight_of(loss, delta):
    """対数確率比の差が delta の 1 対で、−∂L/∂ log π(y_w)。"""
    chosen = delta.reshape(1).clone().requires_grad_()
    zero = torch.zeros_like(chosen)
    value = loss(chosen, zero, zero, zero, beta)
    return -torch.autograd.grad(value, chosen)[0]


deltas = torch.linspace(-5, 15, 81, dtype=torch.float64)
dpo_weights = torch.cat([weight_of(dpo_loss, d) for d in deltas])
ipo_weights = torch.cat([weight_of(ipo_loss, d) for d in deltas])
claim("IPO の重み", ipo_weights, 2 * (1 / (2 * beta) - deltas))
claim("DPO の重み", dpo_weights, beta * torch.sigmoid(-beta * deltas))

# %%
drawn, (axes,) = figure(1, 2, panel=(4.2, 2.8))
for ax, name, weights, colour in (
    (axes[0], "DPO", dpo_weights, COLOURS[0]),
    (axes[1], "IPO", ipo_weights, COLOURS[1]),
):
    ax.plot(deltas, weights, color=colour)
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.set(title=f"{name} の重み", xlabel="$\\Delta$（nat）")
axes[1].axvline(5, color=GREY, linestyle="--", linewidth=1)
drawn

# %% [markdown]
# ### ステップ 8：トークンあたりの平均で書いた IPO
#
# 論文の式では、対数確率はトークンについての和です。TRL は、対数確率比を、それぞれの長さ $\lvert y\rvert$ （EOS も数えます）で割ってから、同じ回帰をします。
#
# $$
# \left(\frac{h(y_w)}{\lvert y_w\rvert}-\frac{h(y_\ell)}{\lvert y_\ell\rvert}-\frac{1}{2\beta}\right)^2
# $$
#
# $h(y)/\lvert y\rvert$ が、ステップ 5 の $h(y)$ の役をします。だから、回答が 2 つだけで、どちらも $L$ トークンなら、差は $L$ 倍の $\frac{L}{2\beta}$ （決定的な選好の場合）になります。
#
# **主張** 長さがまちまちなら、最小点は
#
# $$
# h(y)=\lvert y\rvert\left(c+\frac{p(y\succ\mu)}{\beta}\right)
# $$
#
# です（対は $\mu$ から独立に引くとします）。和の形では正規化で消えた定数 $c$ が、ここでは消えません。 $\sum_y\pi_{\mathrm{ref}}(y)e^{h(y)}=1$ から決まり、左辺は $c$ とともに増えるので、解は一つです。2 分法で求めます。

# %%
lengths = world.mask.sum(-1)
per_token = wins / beta


def total(c):
    """log Σ_y π_ref(y) exp(h(y))。c が正しければ 0。"""
    h = lengths * (c + per_token)
    return (ref_logps + h).logsumexp(-1, keepdim=True)


left, right = torch.tensor([[[-50.0]], [[0.0]]]).double().expand(2, 2, 1)
for _ in range(100):
    middle = (left + right) / 2
    left = torch.where(total(middle) < 0, middle, left)
    right = torch.where(total(middle) < 0, right, middle)
per_token_logps = ref_logps + lengths * (left + per_token)
claim("Σ_y π(y|x) = 1", per_token_logps.exp().sum(-1), torch.ones(2))

# %%
theta = world.logits_of(per_token_logps).requires_grad_()
h = (world.log_probs(theta) - ref_logps) / lengths
loss = 2 * W * P * (differences_of(h) - 1 / (2 * beta)) ** 2
(gradient,) = torch.autograd.grad(loss.sum(), theta)
claim("∇L = 0", gradient, torch.zeros(()), tol=1e-11)
apart = kl(per_token_logps, star_logps).min()
check("和の形の π* とは別の方策", apart > 0.1, f"KL ≥ {apart:.2f}")

# %% [markdown]
# 和の形では、対数確率比 $h$ の大小は勝率だけで決まります。平均の形では、同じ勝率でも、長い回答ほど $\lvert h\rvert$ が大きくなります（ $c+\frac{p(y\succ\mu)}{\beta}$ が 0 のときを除きます）。どちらがよいかは式からは決まりません。以下では、どちらの形なのかを、そのつど書きます。
#
# 長さがそろった対では、 $\frac{L}{2\beta}$ になることを、勾配が 0 になることで確かめます。

# %%
for L in (1, 2, 7):
    tokens = torch.tensor([L])
    chosen = torch.tensor([L / (2 * beta)]).double().requires_grad_()
    zero = torch.zeros_like(chosen)
    loss = ipo_loss(chosen, zero, zero, zero, beta, tokens, tokens)
    (slope,) = torch.autograd.grad(loss, chosen)
    claim(f"{L} トークンどうし: Δ = {chosen.item():g} で勾配 0",
          slope, torch.zeros(1), tol=1e-6)

# %% [markdown]
# ## 実装
#
# IPO の損失を、そのまま NumPy で書きます。引数は、回答ごとの「トークンの対数確率の列」です。 `per_token=False` が論文の和の形、 `True` が TRL のトークン平均の形です。

# %%
import numpy as np


def log_ratio(logps_i, ref_logps_i, per_token):
    length = len(logps_i)
    total = sum(logps_i[t] - ref_logps_i[t] for t in range(length))
    return total / length if per_token else total


def ipo_loss_numpy(chosen, rejected, ref_chosen, ref_rejected, beta,
                   per_token):
    total = 0.0
    for i in range(len(chosen)):
        gap = log_ratio(chosen[i], ref_chosen[i], per_token)
        gap -= log_ratio(rejected[i], ref_rejected[i], per_token)
        total += (gap - 1 / (2 * beta)) ** 2
    return total / len(chosen)


# %% [markdown]
# パッケージの `ipo_loss` は、同じ式をベクトルで書いた PyTorch 版です。対数確率は、和をとってから渡します。長さを渡さなければ和の形、両方の長さを渡せばトークン平均の形です。

# %%
import inspect

print(inspect.getsource(ipo_loss))

# %% [markdown]
# 長さの違う 6 対で、2 つの実装を、2 つの形で比べます。

# %%
rng = np.random.default_rng(0)
sizes = rng.integers(1, 9, size=(2, 6))  # 長さは 1〜8
token_logps = [
    [-rng.exponential(2.0, size=n) for n in sizes[side]]
    for side in (0, 1, 0, 1)  # 方策の y_w, y_l、参照方策の y_w, y_l
]
sums = [torch.tensor([y.sum() for y in side]) for side in token_logps]
counts = torch.from_numpy(sizes)

# %%
claim("和の形: NumPy = PyTorch",
      ipo_loss_numpy(*token_logps, beta=0.3, per_token=False),
      ipo_loss(*sums, 0.3), tol=1e-12)
claim("トークン平均の形: NumPy = PyTorch",
      ipo_loss_numpy(*token_logps, beta=0.3, per_token=True),
      ipo_loss(*sums, 0.3, *counts), tol=1e-12)

# %% [markdown]
# 勾配は、数値微分と比べます（`gradcheck`）。参照方策の対数確率はただのデータなので、勾配は流れません。

# %%
leaves = [x.clone().requires_grad_() for x in sums]
for name, both_lengths in (("和", ()), ("トークン平均", counts)):
    matches = torch.autograd.gradcheck(
        lambda a, b, n=both_lengths: ipo_loss(a, b, *leaves[2:], 0.3, *n),
        leaves[:2],
    )
    check(f"{name}の形: 自動微分の勾配 = 数値微分の勾配", matches)

# %%
ipo_loss(*leaves, 0.3).backward()
check("参照方策に勾配は流れない", leaves[2].grad is None)

# %% [markdown]
# 手計算とも合わせます。 $\beta=0.1$ で、好まれた回答（4 トークン）の対数確率比が 4、好まれなかった回答（2 トークン）が −2 とします。和の形では $(6-5)^2=1$、トークン平均の形では $(1-(-1)-5)^2=9$ です。
# 学習の始まり、つまり方策が参照方策に等しいときは、どちらの形でも $\frac{1}{4\beta^2}=25$ です。

# %%
up, down, zero = (torch.tensor([x]).double() for x in (4.0, -2.0, 0.0))
four, two = torch.tensor([4]), torch.tensor([2])
claim("和の形", ipo_loss(up, down, zero, zero, 0.1), 1.0)
claim("トークン平均の形",
      ipo_loss(up, down, zero, zero, 0.1, four, two), 9.0)
claim("始まりは、どちらも 25",
      [ipo_loss(up, down, up, down, 0.1),
       ipo_loss(up, down, up, down, 0.1, four, two)], [25.0, 25.0])

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じデータで、損失と勾配を比べる
#
# 相手は TRL の `DPOTrainer` そのものです。SFT 済みの小さなモデル（float64）を参照方策とし、その重みを少し動かしたものを方策とします。
# データは、「20未満の素数の合計は？」のような問題の選好データ 8 対です。回答の長さはそろっていません。

# %%
from companion.lm import load

ref_model, tokenizer = load("prime-sums", dtype=torch.float64)
model, _ = load("prime-sums", dtype=torch.float64)
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn(
            parameter.shape, generator=g, dtype=parameter.dtype)

# %%
from companion.oracle import preference_batch, trl_dpo
from companion.tasks import PRIME_SUMS, preferences

pairs = preferences(PRIME_SUMS, 8, seed=0)
eos = tokenizer.eos_token


def token_ids(texts, end=""):
    return tokenizer([text + end for text in texts])["input_ids"]


# %%
batch = preference_batch(
    token_ids(pairs["prompt"]),
    token_ids(pairs["chosen"], end=eos),
    token_ids(pairs["rejected"], end=eos),
    pad_token_id=tokenizer.pad_token_id,
)
n_w, n_l = batch["completion_mask"].sum(-1).chunk(2)
print("トークン数: 好まれた", n_w.tolist(), "好まれなかった", n_l.tolist())

# %% [markdown]
# `trl_dpo` は、TRL のトレーナーの `compute_loss` をそのまま呼び、損失と、モデルの全パラメータについての勾配を返します。

# %%
theirs = trl_dpo(
    model, ref_model, batch, tokenizer, loss_type="ipo", beta=0.1
)

# %% [markdown]
# こちらは、同じモデルから対数確率を計算し、長さといっしょに `ipo_loss` に渡します。

# %%
from companion.lm import sequence_log_probs

chosen_logps, rejected_logps = sequence_log_probs(model, **batch).chunk(2)
with torch.no_grad():
    ref_both = sequence_log_probs(ref_model, **batch).chunk(2)
ref_chosen_logps, ref_rejected_logps = ref_both
ours = ipo_loss(chosen_logps, rejected_logps, *ref_both, 0.1, n_w, n_l)

# %%
names, parameters = zip(*model.named_parameters(), strict=True)
gradients = torch.autograd.grad(ours, parameters, retain_graph=True)
gradient_gaps = [
    (gradient - theirs.gradients[name]).abs().max().item()
    for name, gradient in zip(names, gradients, strict=True)
]
claim("損失: PyTorch = TRL", ours, theirs.loss, tol=1e-12)
check("全パラメータの勾配が一致", max(gradient_gaps) <= 1e-12,
      f"{len(gradient_gaps)} 個のテンソルで最大差 {max(gradient_gaps):.0e}")

# %% [markdown]
# NumPy 版にも、トークンごとの対数確率を渡します。和の形も並べて、表にまとめます。

# %%
from companion.lm import token_log_probs


def completion_tokens(lm):
    """各回答のトークンの対数確率。好まれた 8 つと、好まれなかった 8 つ。"""
    logps = token_log_probs(lm, **batch).detach()
    masks = batch["completion_mask"].bool()
    kept = [row[m].numpy() for row, m in zip(logps, masks, strict=True)]
    return kept[:8], kept[8:]


# %%
import pandas as pd

of_tokens = *completion_tokens(model), *completion_tokens(ref_model)
by_numpy = ipo_loss_numpy(*of_tokens, 0.1, per_token=True)
sum_numpy = ipo_loss_numpy(*of_tokens, 0.1, per_token=False)
sum_torch = ipo_loss(chosen_logps, rejected_logps, *ref_both, 0.1)
claim("損失: NumPy = TRL", by_numpy, theirs.loss, tol=1e-12)
claim("和の形: NumPy = PyTorch", sum_numpy, sum_torch, tol=1e-12)

# %%
three = {"NumPy": by_numpy, "torch": ours.item(), "TRL": theirs.loss.item()}
spread_of_three = max(three.values()) - min(three.values())
rows = pd.DataFrame(
    [three, {"NumPy": sum_numpy, "torch": sum_torch.item()}],
    index=["トークン平均の形（TRL）", "和の形（論文の式）"],
).map("{:.12f}".format).replace("nan", "–")
rows["最大差"] = [
    f"{spread_of_three:.0e}", f"{abs(sum_numpy - sum_torch.item()):.0e}"]
rows

# %%
form_gap = abs(sum_torch.item() - theirs.loss.item())
check("TRL の値は、和の形ではない", form_gap > 1,
      f"{theirs.loss:.4f} と {sum_torch:.4f}")

# %% [markdown]
# ### サポートページのコードを CPU で動かす
#
# サポートページによれば、IPO は、DPO の例の `loss_type="sigmoid"` を `loss_type="ipo"` に変えるだけです。ほかに変えたのは 3 か所です（理由は 4.5.1 節のノートブックに書きました）。モデルをフォルダの場所で渡すこと、出力先を一時フォルダにすること、 `bf16` とどこで動かすかを明示することです。

# %%
import tempfile

from datasets import Dataset

preference_dataset = Dataset.from_list([{
    "prompt": "日本の首都は？",
    "chosen": "東京です。",
    "rejected": "札幌です。",
}])

# %%
from trl import DPOConfig, DPOTrainer

from companion.lm import checkpoint
from companion.training import train

trainer = DPOTrainer(
    model=str(checkpoint("prime-sums")),
    processing_class=tokenizer,
    args=DPOConfig(
        output_dir=tempfile.mkdtemp(),
        loss_type="ipo",  # ここを変えます
        beta=0.1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,  # 表に出すために、毎回記録します
    ),
    train_dataset=preference_dataset,
)
snippet = train(trainer)

# %%
claim("最初の損失は 1/(4β²)", snippet["loss"].iloc[0], 25.0, tol=1e-4)
snippet[["step", "loss", "grad_norm", "rewards/margins"]]

# %% [markdown]
# ### 式と TRL の違い
#
# 一つずつ、数で確かめましょう。データの切り詰め、参照方策の読み直し、チャットテンプレートなど、 `DPOTrainer` に共通のことは 4.5.1 節のノートブックにあります。ここでは、IPO に特有のことだけを扱います。
#
# **長さで割ります。** 上の表のとおり、論文の式をそのまま書くと和の形で、TRL は長さで割った形です。TRL のコメントによれば、論文の著者に確認し、論文の実験もこの形だったとのことです。

# %%
differences = {
    "長さで割る": f"TRL {theirs.loss:.4f}、和の形 {sum_torch:.4f}"
}

# %% [markdown]
# **長さには EOS も数えます。** 数え忘れると、値が変わります。

# %%
no_eos = ipo_loss(chosen_logps, rejected_logps, *ref_both, 0.1,
                  n_w - 1, n_l - 1)
lengths_text = f"EOS も数える {ours:.4f}、数えない {no_eos:.4f}"
check("長さに EOS も入る", abs(no_eos - theirs.loss) > 1e-2, lengths_text)
differences["EOS も長さに数える"] = lengths_text

# %% [markdown]
# **`beta` は論文の $\tau$ です。始まりの損失は $\frac{1}{4\beta^2}$ です。** DPO の log 2 と違って $\beta$ によるので、 $\beta$ の違う学習の損失をそのまま比べることはできません。

# %%
starts = {b: trl_dpo(ref_model, ref_model, batch, tokenizer,
                     loss_type="ipo", beta=b) for b in (0.1, 0.5, 1.0)}
start_losses = [start.loss for start in starts.values()]
claim("学習前の損失 = 1/(4β²)", start_losses, [25.0, 1.0, 0.25], tol=1e-10)
differences["学習前の損失（β = 0.1、0.5、1）"] = "25、1、0.25"

# %% [markdown]
# **始まりの勾配は $\frac1\beta$ に比例します。** DPO では $\beta$ に比例しました。TRL の既定値では、勾配のノルムが `max_grad_norm` （1.0）を超えると縮められます。 $\beta$ が小さいと、ほとんど毎回そうなるでしょう（「学習」で確かめます）。

# %%
def norm_of(result):
    squares = [x.pow(2).sum() for x in result.gradients.values()]
    return torch.stack(squares).sum().sqrt().item()


norms = [norm_of(start) for start in starts.values()]
claim("β が 5 倍、10 倍なら、ノルムは 1/5、1/10",
      [norms[1] / norms[0], norms[2] / norms[0]], [1 / 5, 1 / 10], tol=1e-6)
differences["始まりの勾配のノルム（β = 0.1、0.5、1）"] = "、".join(
    f"{norm:.1f}" for norm in norms)

# %% [markdown]
# **記録される `rewards/margins` は、長さで割っていない和に $\beta$ をかけたものです。** 損失が見ている「トークンあたりの差」とは別の数なので、損失が 0 になったときの値は $\frac12$ ではなく、両方が $L$ トークンなら $\frac{L}{2}$ です。

# %%
sum_margin = 0.1 * (chosen_logps - ref_chosen_logps
                    - rejected_logps + ref_rejected_logps).mean()
logged_margin = theirs.metrics["rewards/margins"]
claim("rewards/margins = β × 和の差",
      logged_margin, sum_margin.item(), tol=1e-6)
mean_margin = 0.1 * ((chosen_logps - ref_chosen_logps) / n_w
                     - (rejected_logps - ref_rejected_logps) / n_l).mean()
margin_text = f"記録 {logged_margin:.4f}、トークンあたり {mean_margin:.4f}"
check("トークンあたりの差ではない", abs(logged_margin - mean_margin) > 1e-3,
      margin_text)
differences["rewards/margins は和"] = margin_text

# %% [markdown]
# **`label_smoothing` は無視されます。** IPO の損失の式には出てきません。設定しても、エラーにも警告にもなりません。

# %%
smoothed = trl_dpo(model, ref_model, batch, tokenizer, loss_type="ipo",
                   beta=0.1, label_smoothing=0.3).loss
claim("label_smoothing=0.3 でも同じ値", smoothed, theirs.loss, tol=1e-12)
differences["label_smoothing=0.3"] = f"変わらない（{smoothed:.4f}）"

# %% [markdown]
# **`f_divergence_type` は効きます。** 既定値 `reverse_kl` 以外にすると、対数確率比 $h$ が別の関数に置き換わり、それを長さで割って同じ回帰をします。たとえば `forward_kl` では $1-e^{-h}$ です。これは、もう論文の IPO ではありません。

# %%
u = 1 - torch.exp(-(chosen_logps - ref_chosen_logps))
v = 1 - torch.exp(-(rejected_logps - ref_rejected_logps))
by_hand = ((u / n_w - v / n_l - 5) ** 2).mean()
forward = trl_dpo(model, ref_model, batch, tokenizer, loss_type="ipo",
                  beta=0.1, f_divergence_type="forward_kl").loss
claim("forward_kl: 式 = TRL", by_hand / forward, 1.0, tol=1e-10)
differences["f_divergence_type='forward_kl'"] = f"{forward:.4f}"

# %% [markdown]
# **TRL 1.16.0 は float32 で計算します。** 対数確率を float32 に丸めると、損失はこれだけずれます。

# %%
rounded = ipo_loss(
    chosen_logps.float(), rejected_logps.float(),
    ref_chosen_logps.float(), ref_rejected_logps.float(), 0.1, n_w, n_l,
)
rounding = abs(rounded.double() - ours).item()
check("float32 の丸めの大きさ", rounding < 1e-4, f"{rounding:.0e}")
differences["1.16.0 は float32"] = f"損失の差 {rounding:.0e}"

# %%
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、TRL の `DPOTrainer(loss_type="ipo")` で学習させます。課題は 6 桁の数字の並べ替え（`780667>` → `066778`）です。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。答えは「知って」いますが、サンプリングすると半分以上まちがえます。
# ですから、ここで見るのは、新しい能力が生まれるところではなく、選好によって正解が **選び取られていく** ところです。
#
# 選好データは、4.5.1 節と同じです。手本と同じ分布から引いた、互いに異なる 2 つの回答を、真の報酬の Bradley–Terry モデルで比べました。ラベルには雑音があり、ときには正解のほうが負けます。

# %%
from companion.tasks import SORTING
from companion.training import preset

ipo_preset = preset("ipo")
sort_pairs = preferences(SORTING, ipo_preset.examples, seed=0)
sort_pairs.to_pandas().head(4)

# %% [markdown]
# 大きさ、学習率、 $\beta$ は、パッケージの表（プリセット）から取ります。サポートページの $\beta=0.1$ は、すぐ後で試します。
#
# 回答はどれも 6 桁と EOS の 7 トークンです。TRL の IPO はトークン平均の形なので、 $\beta=1$ なら、一つの対の差の目標は $\frac{7}{2\beta}=3.5$ です。

# %%
from dataclasses import asdict

pd.DataFrame([asdict(ipo_preset)])


# %%
def train_ipo(beta):
    trainer = DPOTrainer(
        model=str(checkpoint("sorting", ipo_preset.size)),
        processing_class=tokenizer,
        args=DPOConfig(
            loss_type="ipo", beta=beta, **ipo_preset.arguments()
        ),
        train_dataset=sort_pairs,
    )
    return trainer.model, train(trainer)


# %%
trained_model, history = train_ipo(ipo_preset.beta)

# %%
from companion.plots import curves

both = {"好まれた": "chosen", "好まれなかった": "rejected"}
curves(history, {
    "損失": "loss",
    "選好の正解率（学習データ）": "rewards/accuracies",
    "マージン（β × 和の差）": "rewards/margins",
    "回答の対数確率（nat）": {k: f"logps/{y}" for k, y in both.items()},
    "暗黙の報酬": {k: f"rewards/{y}" for k, y in both.items()},
    "勾配のノルム": "grad_norm",
})

# %% [markdown]
# 損失は $\frac{1}{4\beta^2}=0.25$ から始まります。ラベルに雑音があるので 0 にはなりません。マージンは増えたあと、目標の 3.5 に届かないところで落ち着きます。選好の正解率が 0 から始まるのは、はじめはすべて引き分けで、TRL は引き分けを不正解に数えるからです。
#
# 学習に使っていないプロンプトで、正解率を測ります。「貪欲法」は、いちばん確率の高い文字を選びつづけたとき、「サンプリング」は、温度 1 で引いたときです。
# 参照方策からの KL ダイバージェンスも、引いた回答の対数確率比の平均で見積もります。

# %%
from companion.lm import completion_batch, generate, measure

sft_model, _ = load("sorting", ipo_preset.size)
prompts = SORTING.test_prompts


def log_prob(lm, ys):
    rows = completion_batch(tokenizer, prompts, ys)
    with torch.no_grad():
        return sequence_log_probs(
            lm, **{name: ids.to(lm.device) for name, ids in rows.items()}
        ).cpu()


# %%
def report(lm):
    ys = generate(lm, tokenizer, prompts, max_new_tokens=8, temperature=1.0)
    kl_estimate = (log_prob(lm, ys) - log_prob(sft_model, ys)).mean().item()
    scores = measure(lm, tokenizer, SORTING, prompts)
    return scores | {"KL(π‖π_ref)": kl_estimate}


before, after = report(sft_model), report(trained_model)
claim("学習前の KL は 0", before["KL(π‖π_ref)"], 0.0, tol=1e-6)

# %%
from companion.plots import before_after

titles = {"sampled": "サンプリング", "greedy": "貪欲法"}
before_after(
    {title: (before[key], after[key]) for key, title in titles.items()},
    limits=(0, 1), title="正解率",
)

# %%
gain = after["sampled"] - before["sampled"]
check("サンプリングの正解率が 0.2 以上あがる", gain > 0.2, f"+{gain:.3f}")
check("貪欲法の正解率は 0.93 以上を保つ", after["greedy"] > 0.93,
      f"{before['greedy']:.3f} → {after['greedy']:.3f}")
margin = history["rewards/margins"].iloc[-1]
check("マージンが増え、目標の 3.5 は超えない", 0.5 < margin < 3.5,
      f"0 → {margin:.2f}")

# %% [markdown]
# 同じプロンプト、同じ乱数で、回答を並べてみます。

# %%
samples = pd.DataFrame({"プロンプト": prompts[:8]})
for name, lm in (("学習前", sft_model), ("学習後", trained_model)):
    ys = generate(
        lm, tokenizer, prompts[:8], max_new_tokens=8, temperature=1.0
    )
    samples[name] = [
        f"{y} {'○' if y == SORTING.answer(x) else '×'}"
        for x, y in zip(prompts[:8], ys, strict=True)
    ]
samples

# %% [markdown]
# ### サポートページの β = 0.1 では
#
# ほかの設定はそのままで、 $\beta$ だけを 0.1 にします。一つの対の差の目標は $\frac{7}{2\beta}=35$、確率の比でいえば $e^{35}$ 倍です。

# %%
low_model, low_history = train_ipo(beta=0.1)
low = report(low_model)

# %%
logged = ["logps/chosen", "logps/rejected", "rewards/accuracies",
          "grad_norm"]
summary = pd.DataFrame({
    "学習前": before | history[logged].iloc[0].to_dict(),
    f"β = {ipo_preset.beta:g}": after | history[logged].iloc[-1].to_dict(),
    "β = 0.1": low | low_history[logged].iloc[-1].to_dict(),
})
summary.T.map("{:.3f}".format)

# %%
for key, title in titles.items():
    check(f"{title}の正解率は、β = 0.1 のほうが低い",
          low[key] < after[key] - 0.02,
          f"{after[key]:.3f} と {low[key]:.3f}")
check("参照方策からは、β = 0.1 のほうが遠い",
      low["KL(π‖π_ref)"] > 2 * after["KL(π‖π_ref)"],
      f"KL {after['KL(π‖π_ref)']:.2f} と {low['KL(π‖π_ref)']:.2f}")
check("β = 0.1 では、好まれた回答の対数確率がもっと下がる",
      low_history["logps/chosen"].iloc[-1]
      < history["logps/chosen"].iloc[-1] - 0.5,
      f"{history['logps/chosen'].iloc[-1]:.2f} と "
      f"{low_history['logps/chosen'].iloc[-1]:.2f}")
check("勾配のノルムは、記録した回すべてで 1 を超える",
      low_history["grad_norm"].min() > 1,
      f"{low_history['grad_norm'].min():.1f} 以上")

# %% [markdown]
# $\beta=0.1$ では、参照方策からずっと遠くへ行き、好まれた回答の対数確率まで下がり、正解率はどちらの測り方でも $\beta=1$ より低くなりました（1 回ずつの結果です）。
# 「IPO の差は有限の値で止まる」といっても、その値は $\frac1\beta$ に比例し、回答の長さにも比例します。この小さなモデルと課題には、 $\beta=0.1$ の目標は遠すぎたようです。

# %% [markdown]
# ## 実験
#
# ここからは、もう一度「全部を数え上げられる世界」に戻ります。方策は表形式、損失は、パッケージの `dpo_loss` と、 `ipo_loss` の **和の形** です（回答の長さがすべて 1 なら、トークン平均の形と同じです）。
# 対を 8 通りに引き直し（8 シードと呼びます）、まとめて学習します。図の線は 8 シードの中央値、帯は最小値から最大値までです。
#
# ### 実験 1：いつでも勝つ回答があると、DPO は止まらず、IPO は止まる
#
# K 個の回答から、異なる 2 つを一様に引き、番号の小さいほうが必ず好まれるとします。参照方策は一様分布、 $\beta=0.1$、対は 1 シードあたり 500 です。K は 2、3、6 とし、比べるために、回答が 2 つで勝率が 0.8 の場合も加えます。
# 勾配法で学習し、1 番と K 番の対数確率比の差 $h(y_1)-h(y_K)$ を追います。勾配の大きさが DPO では $\beta$ に、IPO では $\frac1\beta$ に比例するので、学習率は別々に選びます（DPO は $2/\beta^2$、IPO は 0.2）。ですから、速さではなく、行き先を比べてください。

# %%
def draw_pairs(pairs, P, n, g, seeds=8):
    """対の一覧から一様に n 対引き、確率 P で勝ち負けを決める。"""
    pairs = torch.tensor(pairs)
    first, second = pairs[torch.randint(
        len(pairs), (seeds, n), generator=g)].unbind(-1)
    coins = torch.rand(seeds, n, generator=g, dtype=P.dtype)
    won = coins < P[first, second]
    return torch.where(won, first, second), torch.where(won, second, first)


def all_pairs(K):
    return [(i, j) for i in range(K) for j in range(i + 1, K)]


# %%
def descend(loss, data, K, beta, lr, steps):
    """勾配法で学習し、途中の log π をすべて返す (更新回数, シード, K)。"""
    y_w, y_l = data
    theta = torch.zeros(len(y_w), K).double().requires_grad_()
    ref = torch.full_like(y_w, -np.log(K), dtype=torch.float64).flatten()
    optimizer = torch.optim.SGD([theta], lr=lr)
    trace = []
    for _ in range(steps + 1):
        logps = theta.log_softmax(-1)
        trace.append(logps.detach())
        chosen, rejected = (logps.gather(-1, y).flatten() for y in data)
        value = loss(chosen, rejected, ref, ref, beta)
        optimizer.zero_grad()
        (len(y_w) * value).backward()  # シードの平均を和に戻す
        optimizer.step()
    return torch.stack(trace)


# %%
beta = 0.1
METHODS = {"DPO": (dpo_loss, 2 / beta**2), "IPO": (ipo_loss, 0.2)}
always = {f"{K} つの回答": (K, total_order(K)) for K in (2, 3, 6)}
noisy_P = torch.tensor([[0.5, 0.8], [0.2, 0.5]], dtype=torch.float64)
settings = always | {"2 つの回答、勝率 0.8": (2, noisy_P)}

# %%
g = torch.Generator().manual_seed(1)
ends = {}
for title, (K, P_K) in settings.items():
    data = draw_pairs(all_pairs(K), P_K, 500, g)
    for method, (loss, lr) in METHODS.items():
        trace = descend(loss, data, K, beta, lr, steps=300)
        ends[title, method] = (trace[..., 0] - trace[..., -1]).T

# %%
from companion.plots import spread

drawn, axes = figure(2, 2, panel=(4.2, 2.7))
for ax, (title, (K, P_K)) in zip(axes.flat, settings.items(), strict=True):
    h = least_squares(uniform_pairs(K), P_K, beta)
    ax.axhline(h[0] - h[-1], color=GREY, linestyle="--", linewidth=1)
    spread(range(1, 301),
           {method: ends[title, method][:, 1:] for method in METHODS},
           ax=ax, title=title, xlabel="更新回数",
           ylabel="両端の差（nat）")
    ax.set_xscale("log")
drawn

# %% [markdown]
# 破線が、ステップ 5 で求めた IPO の最小点です。横軸は対数です。決定的な選好（はじめの 3 枚）では、DPO の差は伸びつづけます。
# 回答が 2 つのとき、伸び方は対数の目盛りの上でほぼ直線です。勾配の大きさは $\beta\sigma(-\beta\Delta)\approx\beta e^{-\beta\Delta}$ です。これを積分すると、更新回数 $t$ に対して $\Delta\approx\frac1\beta\log t+\text{定数}$ となり、更新回数が 10 倍になるごとに $\frac{\log 10}{\beta}\approx23$ ずつ伸びる計算です。
# IPO は、閉じた形の値で止まります。

# %%
steady = ends["2 つの回答", "DPO"]
growth = steady[:, 300] - steady[:, 30]
check("DPO: 更新回数が 10 倍になると、差は log10/β ≈ 23 伸びる",
      (growth - np.log(10) / beta).abs().max() < 1,
      f"{growth.min():.2f}〜{growth.max():.2f}")

# %%
for title in always:
    late = ends[title, "DPO"][:, [3, 30, 300]].quantile(0.5, dim=0)
    check(f"DPO、{title}: 伸びつづける",
          late[1] > late[0] + 5 and late[2] > late[1] + 5,
          " → ".join(f"{x:.1f}" for x in late))

# %%
for title, (K, P_K) in settings.items():
    h = least_squares(uniform_pairs(K), P_K, beta)
    last = ends[title, "IPO"][:, -1]
    check(f"IPO、{title}: {h[0] - h[-1]:.3f} の近くで止まる",
          (last - (h[0] - h[-1])).abs().max() < 0.9,
          f"{last.min():.3f}〜{last.max():.3f}")

# %% [markdown]
# 回答が 2 つで決定的なら、どのデータでも 5.000 です。ほかの場合にわずかなばらつきがあるのは、引いた対の数（3 つ以上のとき）や勝ち負けの回数（勝率 0.8 のとき）が、データごとに少し違うからです。数えた回数から $W$ と $P$ を作り直せば、止まる場所はぴったり言い当てられます。

# %%
def counts_of(data, K):
    """データの W と P (シード, K, K)。"""
    y_w, y_l = data
    n = torch.zeros(len(y_w), K * K).double()
    n.scatter_add_(1, y_w * K + y_l, torch.ones_like(y_w).double())
    n = n.unflatten(-1, (K, K))
    both = n + n.mT
    return both / both.sum((-2, -1), keepdim=True), n / both.clamp(min=1)


data = draw_pairs(all_pairs(6), total_order(6), 500, g)
trace = descend(ipo_loss, data, 6, beta, lr=0.2, steps=200)
h = least_squares(*counts_of(data, 6), beta)
claim("6 つの回答、8 シード: 学習の行き先 = 最小二乗",
      trace[-1] - trace[-1].mean(-1, keepdim=True), h, tol=1e-6)

# %% [markdown]
# 勝率が 0.8 なら、DPO も止まります。止まる場所は $\frac1\beta\log\frac{0.8}{0.2}\approx13.9$ で、IPO の 3 より遠くです。回答が 2 つのとき、止まらないのは、いつも一方が勝つデータです。データが少なければ、真の勝率が 1 でなくても、データの中ではいつも一方が勝っている、ということがよく起こります。

# %%
noisy = ends["2 つの回答、勝率 0.8", "DPO"]
check("DPO、勝率 0.8: log(p/(1−p))/β の近くで止まる",
      (noisy[:, -1] - np.log(4) / beta).abs().max() < 3
      and (noisy[:, -1] - noisy[:, 200]).abs().max() < 0.01,
      f"{noisy[:, -1].min():.2f}〜{noisy[:, -1].max():.2f}")

# %% [markdown]
# ### 実験 2：対の引き方を変えると、IPO の答えは動き、DPO の答えは動かない
#
# 3 つの回答に、真の報酬 $r=(2,0,-2)$ を与え、ラベルを Bradley–Terry モデルで付けます（ $\beta=0.5$、1 シードあたり 3,000 対）。対の引き方だけを 3 通りに変えます。

# %%
three_rewards = torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)
three_P = bradley_terry(three_rewards)
designs = {
    "一様": [(0, 1), (1, 2), (0, 2)],
    "隣どうしだけ": [(0, 1), (1, 2)],
    "両端を 8 倍": [(0, 1), (1, 2)] + [(0, 2)] * 8,
}


# %%
def weights_of(pairs):
    W = torch.zeros(3, 3, dtype=torch.float64)
    for i, j in pairs:
        W[i, j] += 1 / (2 * len(pairs))
        W[j, i] += 1 / (2 * len(pairs))
    return W


predicted = {}
for name, pairs_of_design in designs.items():
    h = least_squares(weights_of(pairs_of_design), three_P, beta=0.5)
    predicted["DPO", name] = 4 / 0.5
    predicted["IPO", name] = (h[0] - h[2]).item()

# %%
g = torch.Generator().manual_seed(2)
measured = {}
for name, pairs_of_design in designs.items():
    data = draw_pairs(pairs_of_design, three_P, 3_000, g)
    for method, loss, lr in (("DPO", dpo_loss, 8.0), ("IPO", ipo_loss, 0.2)):
        trace = descend(loss, data, 3, beta=0.5, lr=lr, steps=200)
        measured[method, name] = trace[-1, :, 0] - trace[-1, :, 2]

# %%
drawn, (axes,) = figure(1, 2, panel=(4.2, 3.0))
jitter = torch.linspace(-0.12, 0.12, 8)
for ax, method, top, colour in (
    (axes[0], "DPO", 10, COLOURS[0]), (axes[1], "IPO", 2, COLOURS[1])
):
    for place, name in enumerate(designs):
        ax.plot(place + jitter, measured[method, name], "o", color=colour,
                markersize=5, alpha=0.7)
        ax.plot([place - 0.3, place + 0.3], [predicted[method, name]] * 2,
                color=GREY, linestyle="--", linewidth=1.2)
    ax.set_xticks(range(3), list(designs))
    ax.set(title=method, ylabel="両端の差（nat）", ylim=(0, top))
drawn

# %%
for (method, name), gap in predicted.items():
    found = measured[method, name]
    check(f"{method}、{name}: 計算値 {gap:.3f}",
          (found - gap).abs().max() < (0.1 if method == "IPO" else 1.5),
          f"{found.min():.3f}〜{found.max():.3f}")

# %%
few, chain, heavy = (measured["IPO", name] for name in designs)
check("IPO: 8 シードすべてで、隣だけ > 一様 > 両端を 8 倍",
      chain.min() > few.max() and few.min() > heavy.max(),
      f"中央値 {chain.quantile(0.5):.3f}、{few.quantile(0.5):.3f}、"
      f"{heavy.quantile(0.5):.3f}")

# %% [markdown]
# 破線は計算値です。DPO は、どの引き方でも $\frac{r(y_1)-r(y_3)}{\beta}=8$ のまわりに散らばります（データが有限なので、ずれはあります）。IPO の行き先は、引き方ごとに違います。IPO を使うときは、「どんな対を集めたか」も答えの一部です。
#
# ### 実験 3：3 本腕バンディット
#
# 論文にも、3 つの回答 a, b, c だけの小さな実験（3 本腕バンディット）があります。ここでも、3 通りの決定的な選好で、確率の動きを見ましょう（データの作り方と学習の設定は、このノートブックのものです。 $\beta=0.1$、1 シードあたり 300 対）。
#
# - **全順序**：a ≻ b、b ≻ c、a ≻ c
# - **循環**：a ≻ b、b ≻ c、c ≻ a
# - **c が出てこない**：a ≻ b だけ

# %%
bandits = {
    "全順序": [(0, 1), (1, 2), (0, 2)],
    "循環": [(0, 1), (1, 2), (2, 0)],
    "c が出てこない": [(0, 1)],
}
g = torch.Generator().manual_seed(3)
first_wins = torch.ones(3, 3, dtype=torch.float64)  # 一覧の左側が勝つ
arms = {}
for name, pairs_of_bandit in bandits.items():
    data = draw_pairs(pairs_of_bandit, first_wins, 300, g)
    for method, (loss, lr) in METHODS.items():
        trace = descend(loss, data, 3, 0.1, lr, steps=60)
        arms[method, name] = trace.exp()

# %%
drawn, axes = figure(2, 3, panel=(3.4, 2.4))
for ax, ((method, name), probs) in zip(
    axes.T.flat, arms.items(), strict=True
):
    spread(range(61), {arm: probs[..., k].T for k, arm in enumerate("abc")},
           ax=ax, title=f"{method}、{name}", xlabel="更新回数",
           ylabel="確率")
    ax.set_ylim(-0.03, 1.03)
drawn

# %%
for name in ("全順序", "c が出てこない"):
    b_over_a = {
        method: arms[method, name][-1, :, 1] / arms[method, name][-1, :, 0]
        for method in METHODS
    }
    check(f"{name}: π(b)/π(a) は、DPO では 0 へ、IPO では止まる",
          b_over_a["DPO"].max() < 1e-8 and b_over_a["IPO"].min() > 1e-3,
          f"DPO {b_over_a['DPO'].max():.0e} 以下、"
          f"IPO の中央値 {b_over_a['IPO'].quantile(0.5):.4f}")
claim("e^{−3.33} と e^{−5}", [np.exp(-10 / 3), np.exp(-5)],
      [0.0357, 0.0067], tol=1e-4)

# %%
loop = arms["IPO", "循環"][-1]
dpo_loop = arms["DPO", "循環"][-1]
check("循環: 確率の散らばりは、IPO のほうが小さい",
      loop.max() - loop.min() < 0.7 * (dpo_loop.max() - dpo_loop.min()),
      f"IPO {loop.min():.2f}〜{loop.max():.2f}、"
      f"DPO {dpo_loop.min():.2f}〜{dpo_loop.max():.2f}")
unseen = {method: arms[method, "c が出てこない"][-1, :, 2]
          for method in METHODS}
check("c が出てこない: c の確率は 1/3 より減る",
      max(x.max() for x in unseen.values()) < 0.1,
      "、".join(f"{k} {x.max():.0e}" for k, x in unseen.items()))

# %% [markdown]
# $\beta=0.1$ では、IPO も a をはっきり選びますが、b の確率を 0 にはしません。全順序なら $\pi(b)/\pi(a)$ はほぼ $e^{-3.33}$、 a ≻ b だけなら $e^{-5}$ です。循環では、真の勝率はどの回答も 1/2 なので、参照方策のままでいるのが正解です。300 対の中の偶然の偏りに、DPO は IPO より大きく振り回されます（この $\beta$ での結果です。 $\beta$ を変えれば、振れ幅も変わります）。どの対でもいつも一方が勝つのに DPO が止まるのは、勝ち負けが一周していて、どの回答の確率を上げつづけても、どこかの対で損をするからです。
# 3 つ目のデータで c の確率が減るのは、c について何かを学んだからではありません。損失に現れるのは $h(a)-h(b)$ だけで、c の確率は損失からは決まりません（ステップ 5 の「つながっていない」場合です）。c のロジットは出発点のままで、和が 1 になるように確率が減っただけです。
#
# ### 実験 4：IPO の最適点は、報酬と KL の境界線のどこにあるか
#
# 4.5.1 節の実験 2 では、「KL をこれだけ使うなら、報酬はこれが上限」という境界線（フロンティア）の上に、DPO の $\pi^*$ が並びました。同じ世界に、IPO を加えます。
# IPO の最適点は $\pi_{\mathrm{ref}}$ を $p(y\succ\mu)/\beta$ で傾けた方策です。境界線の上にあるのは、 **真の報酬** の定数倍で傾けた方策だけです。Bradley–Terry モデルなら、勝率 $p(y\succ\mu)$ は報酬とともに増えますが、報酬が大きいところで頭打ちになるので、ちょうどの定数倍にはなりません。

# %%
from companion.exact import sample_preferences

g = torch.Generator().manual_seed(1)
ref_logits_8 = world.random_logits(g, 8)
ref_one = world.log_probs(ref_logits_8)[:1]
rewards_one = world.random_rewards(g, 8)[:1]


def kl_and_reward(logps, rewards):
    reward = expect(logps.exp(), rewards)
    return kl(logps, ref_one).mean(-1), reward.mean(-1)


def ipo_star(rewards, b):
    probs = ref_one.exp()[..., None, :]  # μ = π_ref
    return tilt(ref_one, (bradley_terry(rewards) * probs).sum(-1) / b)


# %%
def fit(loss, b, data, steps=100):
    """参照方策から出発し、対のデータを Adam で学習した log π。"""
    start = ref_logits_8[:1].expand(8, -1, -1, -1)
    ref = ref_one.expand(8, -1, -1)
    theta = start.clone().requires_grad_()
    ref_pairs = [ref.gather(-1, y).flatten() for y in data]
    optimizer = torch.optim.Adam([theta], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        logps = world.log_probs(theta)
        now = [logps.gather(-1, y).flatten() for y in data]
        optimizer.zero_grad()
        loss(*now, *ref_pairs, b).backward()
        optimizer.step()
        cosine.step()
    return world.log_probs(theta).detach()


# %% [markdown]
# 1 プロンプトあたり 2,000 対を 8 通りに引き、DPO は $\beta=0.5,\ 1,\ 3$ 、IPO は $\beta=0.1,\ 0.2,\ 0.5$ で学習します。

# %%
BETAS = {"DPO": (0.5, 1, 3), "IPO": (0.1, 0.2, 0.5)}
trained = {}
data = sample_preferences(
    ref_one.exp().expand(8, -1, -1), rewards_one, 2_000, g)
for method, (loss, _) in METHODS.items():
    for b in BETAS[method]:
        logps = fit(loss, b, data)
        trained[method, b] = kl_and_reward(logps, rewards_one)

# %% [markdown]
# もう一つ、学習とは別に、IPO の最適点が境界線からどれだけ下にあるかを正確に計算します。真の報酬を 3 倍、10 倍にした世界も比べます。

# %%
fine = torch.logspace(-3, 3, 6_000).double()[:, None, None]


def below_frontier(scale, b):
    """同じ KL の境界線から、報酬でどれだけ下か（scale で割った値）。"""
    r = scale * rewards_one
    line_kl, line_reward = kl_and_reward(tilt(ref_one, r / scale / fine), r)
    at_kl, reward = kl_and_reward(ipo_star(r, b), r)
    best = np.interp(at_kl, line_kl.flip(0), line_reward.flip(0))
    return at_kl, (torch.from_numpy(best) - reward) / scale


# %%
many = torch.logspace(-1.4, 1.7, 300).double()[:, None, None]
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.4))
frontier = kl_and_reward(tilt(ref_one, rewards_one / many), rewards_one)
axes[0].plot(*frontier, color=GREY, label="境界線")
axes[0].plot(*kl_and_reward(ipo_star(rewards_one, many), rewards_one),
             color="k", linestyle=":", linewidth=1, label="IPO の最適点")
for colour, method in zip(COLOURS, METHODS, strict=False):
    dots = [trained[method, b] for b in BETAS[method]]
    axes[0].plot(*(torch.cat(x) for x in zip(*dots, strict=True)), "o",
                 color=colour, markersize=4, alpha=0.7,
                 label=f"{method} で学習")
for colour, scale in zip(COLOURS[2:], (1, 3, 10), strict=False):
    axes[1].plot(*below_frontier(scale, many), color=colour,
                 label=f"報酬 {scale} 倍")
axes[0].set(title="報酬と KL", ylabel="報酬の期待値", ylim=(-0.05, 1.4))
axes[1].set(title="IPO の最適点は境界線のどれだけ下か",
            ylabel="報酬の不足 ÷ 倍率")
for ax in axes:
    ax.set(xlabel="KL(π‖π_ref)（nat）", xlim=(-0.05, 2.1))
    ax.legend()
drawn

# %%
short = {}
for scale in (1, 3, 10):
    _, missing = below_frontier(scale, many)
    short[scale] = missing.max().item()
    check(f"報酬 {scale} 倍: IPO の最適点は境界線より下",
          missing.min() > 0, f"不足 ÷ 倍率は最大 {short[scale]:.4f}")
check("報酬の差が大きいほど、不足も大きい",
      short[10] > 1.3 * short[3] and short[3] > 2 * short[1],
      " < ".join(f"{x:.4f}" for x in short.values()))

# %%
longer_kl, _ = kl_and_reward(fit(dpo_loss, 0.5, data, 600), rewards_one)
change = longer_kl - trained["DPO", 0.5][0]
check("DPO、β = 0.5: 100 回では、まだ動いているデータがある",
      change.max() > 0.3,
      f"600 回まで続けると、KL は最大 {change.max():.2f} 増える")

# %% [markdown]
# 1 倍の世界では、IPO の最適点（点線）は、図では境界線と見分けがつきません。報酬の差が大きい世界ほど、境界線から離れます。勝率が 1 に近づいて、頭打ちになるからです。報酬が 100 の回答も 10 の回答も、報酬が 0 の相手にはほぼ必ず勝つので、IPO から見れば、たいした違いはありません。
# 学習した点が線の下に散らばるのは、対の数が有限だからです。DPO の点は、100 回の更新で止めた途中の姿でもあります。 $\beta=0.5$ では、続けると KL がさらに増えるデータがあります。
#
# ### 実験 5：同じことを、TRL と言語モデルで
#
# 最後に、TRL の `DPOTrainer` で、DPO と IPO を 1 回ずつ走らせます。回答は a から f の 6 文字で、a ≻ b ≻ … ≻ f の順に必ず勝ちます。15 通りの対を、毎回すべて使います。
# どの回答も EOS を入れて 2 トークンなので、両端の差の行き先は、和の形なら 8.333、TRL のトークン平均の形ならその 2 倍の 16.667 のはずです（ $\beta=0.1$ ）。

# %%
from companion.lm import new_model

letters = "abcdef"
six_pairs = Dataset.from_list([
    {"prompt": "1>", "chosen": letters[i], "rejected": letters[j]}
    for i, j in all_pairs(6)
])
six_folder = tempfile.mkdtemp()
new_model(seed=0).save_pretrained(six_folder)
six_rows = completion_batch(tokenizer, ["1>"] * 6, list(letters))
print("トークン数", six_rows["completion_mask"].sum(-1).tolist())

# %% [markdown]
# 参照方策は、乱数で初期化しただけのモデルです。学習の途中、4 回の更新ごとに、6 つの回答の対数確率を正確に計算します。

# %%
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """6 つの回答の対数確率を記録する。"""

    def __init__(self):
        self.steps, self.logps = [], []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step % 4 == 0:
            rows = {k: ids.to(model.device) for k, ids in six_rows.items()}
            with torch.no_grad():
                logps = sequence_log_probs(model, **rows)
            self.steps.append(state.global_step)
            self.logps.append(logps.double().cpu())


# %%
def watch_run(loss_type):
    watch = Watch()
    arguments = ipo_preset.arguments(
        learning_rate=1e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=15,
        max_steps=61,  # 60 回のあとも測る
    )
    trainer = DPOTrainer(
        model=six_folder, processing_class=tokenizer,
        args=DPOConfig(loss_type=loss_type, beta=0.1, **arguments),
        train_dataset=six_pairs, callbacks=[watch],
    )
    train(trainer)
    logps = torch.stack(watch.logps)
    return watch.steps, logps - logps[0]  # 参照方策との差が h


# %%
runs = {"DPO": watch_run("sigmoid"), "IPO": watch_run("ipo")}
six_ends = {name: h[:, 0] - h[:, -1] for name, (_, h) in runs.items()}

# %%
drawn, ((ax,),) = figure(panel=(5.6, 3.2))
for colour, name in zip(COLOURS, runs, strict=False):
    ax.plot(runs[name][0], six_ends[name], color=colour, label=name)
ax.axhline(50 / 3, color=GREY, linestyle="--", linewidth=1)
ax.set(title="6 つの回答の両端の差（TRL、β = 0.1）",
       xlabel="更新回数", ylabel="h(a) − h(f)（nat）")
ax.legend()
drawn

# %%
dpo_ends, ipo_ends = six_ends["DPO"], six_ends["IPO"]
check("IPO: 16.667 の近くで止まる", abs(ipo_ends[-1] - 50 / 3) < 1,
      f"{ipo_ends[-1]:.2f}")
half = len(dpo_ends) // 2
check("DPO: 後半も伸びつづけ、IPO の 1.5 倍を超える",
      dpo_ends[-1] > dpo_ends[half] + 1
      and dpo_ends[-1] > 1.5 * ipo_ends[-1],
      f"{dpo_ends[half]:.1f} → {dpo_ends[-1]:.1f}")

# %% [markdown]
# DPO の差は伸びつづけ、IPO の差は 16.667 の近くで止まりました（1 回ずつの結果です）。論文の和の形から計算した 8.333 ではなく、その 2 倍のところです。論文の式のつもりで TRL の `beta` を決めるときは、回答のトークン数も考えに入れてください。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/4.5.4.2-ipo.ipynb](exercises/4.5.4.2-ipo.ipynb) で、IPO の損失を 2 つの形で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **対を増やす** 実験 2 で、両端の対を 8 倍から 100 倍に増やすと、IPO の両端の差はいくつに近づくでしょうか。ステップ 5 の式から予想し、 `least_squares` で確かめてください。
# 3. **長さ** ステップ 8 で、勝率がすべて等しいとき（ $p(y\succ\mu)=\frac12$ ）、トークン平均の形の最小点はどんな方策でしょうか。 $c$ の式から考えてください。
# 4. **混ぜる** 実験 1 の、回答が 2 つで「いつでも 1 番が勝つ」データに、1 対だけ逆のラベルを混ぜると、DPO の行き先はどうなるでしょうか。1,000 対のうちの 1 対なら、止まる場所はいくつでしょうか。
# 5. **学習の β** 学習の節で、 $\beta$ を 0.5 に変えると、正解率と KL はどう変わるでしょうか。乱数の種（ `ipo_preset.arguments(seed=…)` ）も変えて、1 回の結果をどこまで信じてよいか考えましょう。

# %% [markdown]
# ## 参考文献
#
# - Azar, Rowland, Piot, Guo, Calandriello, Valko, Munos. A General Theoretical Paradigm to Understand Learning from Human Preferences. 2023. [arXiv:2310.12036](https://arxiv.org/abs/2310.12036) ΨPO と IPO の論文です。ステップ 1〜4 はこの論文の導出に沿っています。
# - Rafailov, Sharma, Mitchell, Ermon, Manning, Finn. Direct Preference Optimization: Your Language Model is Secretly a Reward Model. 2023. [arXiv:2305.18290](https://arxiv.org/abs/2305.18290) DPO の論文です。
# - Bradley, Terry. Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons. Biometrika 39, 1952. ステップ 2 の選好モデルです。
# - TRL 1.12.0 `DPOTrainer`（`trl/trainer/dpo_trainer.py`）。
