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
# # 5.3.4 GSPO：系列の重要度比
#
# 本書 5.3.4 節の式 (5.22)〜(5.25) を扱います。
#
# GRPO は、生成時の方策といまの方策のずれを、トークンごとの重要度比 $w_{i,t}$ で直し、トークンごとに切り詰め（クリップし）ます。
# GSPO（group sequence policy optimization）は、回答ごとに一つの比 $\xi_i$ を使います。 $\xi_i$ はトークンの比の **幾何平均** で、切るか切らないかも回答ごとに決まります。
# このノートブックでは、 $\xi_i$ の性質を小さな世界で一つずつ実行し、TRL の `GRPOTrainer` と値・勾配が一致することを確かめ、小さな言語モデルを学習させます。
# 途中で、 $\xi_i$ は「重要度比」という名前ですが期待値を直す働きは弱いこと、その代わりに何が得られるのか、そしてサポートページの設定のままでは GSPO が（KL 項のない）GRPO とまったく同じ学習になることを、数で確かめます。
# 最後に、GRPO・Dr. GRPO・DAPO・GSPO を、同じ課題・同じ乱数・同じ予算で比べます。
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
# | $x,\ y_i$ （プロンプト、 $i$ 番目の回答） | `prompt`, `completion` | – | `prompt`, `completion` |
# | $\log\pi_\theta(y_{i,t}\mid x,y_{i,<t})$ （いまの方策） | `logps`、世界では `new_tokens` | (B, T)、世界では (X, Y, T) | `per_token_logps` |
# | $\log\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})$ （生成時の方策） | `old_logps`、世界では `old_tokens` | 同じ | `old_per_token_logps` |
# | $w_{i,t}(\theta)=\pi_\theta/\pi_{\theta_{\mathrm{old}}}$ （トークンの重要度比） | `ratios`（対数は `log_ratios`） | 同じ | `coef_1`（`"token"` のとき） |
# | $\lvert y_i\rvert$ （回答の長さ。EOS を含む） | `lengths` | (B,)、世界では (Y,) | `completion_mask.sum(-1)` |
# | $\xi_i(\theta)$ （系列の重要度比、式 (5.22)） | `xi` | (B,)、世界では (X, Y) | `coef_1`（`"sequence"` のとき） |
# | $\rho_i(\theta)=\prod_t w_{i,t}(\theta)$ （比の積） | `product` | 同じ | – |
# | $\widehat{A}_i$ （アドバンテージ、式 (5.23)） | `advantages` | (B,) | `advantages` |
# | $\epsilon$ （クリップの幅） | `epsilon` | – | `epsilon` |
# | $G$ （1 つのプロンプトに書かせる回答の数） | `G` | – | `num_generations` |
#
# B は回答の数、T はいちばん長い回答のトークン数（短い回答は右をパディングで埋め、`mask` で区別します）、X はプロンプトの数、Y は数え上げた回答の数です。 $\rho_i$ は、このノートブックだけの記号です。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 文字は a と b の 2 つ、回答は最長 4 トークンという、とても小さな言語を用意します。回答は EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。
# 方策は、プロンプトと接頭辞（それまでに書いた文字列）ごとに、次のトークンのロジットを並べた表です（表形式の方策）。期待値はどれも有限の和になり、等式の両辺を float64 で計算して比べられます。

# %%
from companion.exact import World, expect

world = World(prompts=2, letters=2, max_length=4)
lengths = world.mask.sum(-1).double()  # |y|、(Y,)
print(len(world.responses), "通りの回答:", *world.responses[:8], "…",
      *world.responses[-2:])

# %% [markdown]
# 生成時の方策 $\pi_{\theta_{\mathrm{old}}}$ を乱数で決め、それを少し動かしたものを、いまの方策 $\pi_\theta$ とします。回答は $\pi_{\theta_{\mathrm{old}}}$ から引いてあるのに、方策はもう先へ進んでいる、という状況です（**方策オフ**、off-policy）。

# %%
g = torch.Generator().manual_seed(0)
old_logits = world.random_logits(g)
new_logits = old_logits + 0.5 * world.random_logits(g)

old_tokens = world.token_log_probs(old_logits)  # log π_old(y_t|…)
new_tokens = world.token_log_probs(new_logits)  # パディングでは 0
old_probs, new_probs = old_tokens.sum(-1).exp(), new_tokens.sum(-1).exp()
claim("Σ_y π_old(y|x) = 1", old_probs.sum(-1), torch.ones(2))

# %% [markdown]
# ### ステップ 1：ξ はトークンの比の幾何平均
#
# トークンの比を掛け合わせると、回答全体の確率の比になります。
#
# $$
# \rho(\theta)=\prod_{t=1}^{|y|}w_t(\theta)=\frac{\pi_\theta(y\mid x)}{\pi_{\theta_{\mathrm{old}}}(y\mid x)}
# $$
#
# 式 (5.22) の $\xi$ は、対数比をトークンについて **平均** してから指数をとります。つまり $\xi=\rho^{1/|y|}$ です。

# %%
log_ratios = new_tokens - old_tokens  # log w_t、(X, Y, T)
ratios = log_ratios.exp()  # パディングでは 1
product = ratios.prod(-1)  # ρ
xi = (log_ratios.sum(-1) / lengths).exp()  # 式 (5.22)

claim("Π_t w_t = π_θ(y|x)/π_old(y|x)", product, new_probs / old_probs)
claim("ξ = (Π_t w_t)^{1/|y|}", xi, product ** (1 / lengths))

# %% [markdown]
# 幾何平均なので、 $\xi$ は、トークンの比の最小値と最大値のあいだにあり、算術平均を超えません。1 トークンの回答では $\xi=w_1$ です。

# %%
highest = ratios.masked_fill(~world.mask, 0).max(-1).values
lowest = ratios.masked_fill(~world.mask, torch.inf).min(-1).values
mean_ratio = (ratios * world.mask).sum(-1) / lengths
tiny = 1e-12  # 1 トークンの回答では、丸めのほかは等しい
check("最小の比 ≤ ξ ≤ 比の算術平均 ≤ 最大の比",
      (lowest <= xi + tiny).all() and (xi <= mean_ratio + tiny).all()
      and (mean_ratio <= highest + tiny).all())

# %%
short = lengths == 1
claim("|y| = 1 なら ξ = w_1", xi[:, short], ratios[:, short, 0])

# %% [markdown]
# なぜ積のままではいけないのでしょう。どのトークンの確率もそろって $e^{0.01}$ 倍（約 1 %）になったとします。100 トークンの回答では、積は $e^{1}\approx2.72$、 $\xi$ は長さによらず $e^{0.01}\approx1.01$ です。
# 積を $[1-\epsilon,1+\epsilon]$ に切り詰めると、 $\epsilon$ の意味が回答の長さで変わってしまいます。長さで割れば、この例では、どの長さの回答にも同じ $\epsilon$ を使えます。トークンの比がそろわず、ばらばらに動く場合は、ステップ 5 で調べます。

# %%
for n in (4, 100):
    same = torch.full((n,), 0.01, dtype=torch.float64)
    print(f"{n:3d} トークン: 積 {same.sum().exp():.5f}、"
          f"ξ {same.mean().exp():.5f}")
    claim("ξ は長さによらず e^0.01", same.mean().exp(), 1.010050167084168)

# %% [markdown]
# ### ステップ 2：勾配はトークンを平等に扱う
#
# $\xi$ を微分すると、
#
# $$
# \nabla_\theta\,\xi_i(\theta)=\frac{\xi_i(\theta)}{|y_i|}\sum_{t=1}^{|y_i|}\nabla_\theta\log\pi_\theta(y_{i,t}\mid x,y_{i,<t})
# $$
#
# です。回答の中のどのトークンの $\nabla\log\pi_\theta$ も、同じ重み $\xi_i/|y_i|$ で足されます。GRPO では、この重みが $w_{i,t}/|y_i|$ で、トークンごとに違います。

# %%
y_long = world.responses.index("abab")
theta = new_logits.clone().requires_grad_()
tokens = world.token_log_probs(theta)[0, y_long]
xi_long = (tokens - old_tokens[0, y_long]).mean().exp()
(grad_xi,) = torch.autograd.grad(xi_long, theta, retain_graph=True)
(score,) = torch.autograd.grad(tokens.sum(), theta)
claim("∇ξ = ξ/|y| Σ_t ∇log π_θ", grad_xi, xi[0, y_long] / 4 * score)

# %% [markdown]
# 損失でも確かめます。GSPO の目的関数は、 $\xi_i$ を切り詰めた回答ごとの値 $\widehat W_i$ （式 (5.24)）の平均（式 (5.25)）です。
#
# $$
# \widehat W_i(\theta)=\min\{\xi_i\widehat A_i,\ \mathrm{clip}(\xi_i,1-\epsilon,1+\epsilon)\,\widehat A_i\},\qquad
# J(\theta)=\mathbb{E}\left[\frac1G\sum_{i=1}^{G}\widehat W_i(\theta)\right]
# $$
#
# `gspo_loss` と `grpo_loss` は、式 (5.25) と GRPO の式 (5.4) の符号を逆にした、パッケージの損失関数です（ `gspo_loss` の中身は「実装」で読みます）。まずは $\epsilon$ を大きくして、クリップが働かないようにします。

# %%
from companion.losses import grpo_loss, gspo_loss

advantage = torch.tensor([1.5], dtype=torch.float64)
one_row = new_tokens[:1, y_long].clone().requires_grad_()
four = torch.ones(1, 4)
token_grads = {}
for name, loss_of in (("GRPO", grpo_loss), ("GSPO", gspo_loss)):
    loss = loss_of(one_row, old_tokens[:1, y_long], advantage, four, 9.0)
    (token_grads[name],) = torch.autograd.grad(loss, one_row)

# %%
claim("GRPO: トークン t の勾配は −Â w_t/|y|", token_grads["GRPO"][0],
      -1.5 * ratios[0, y_long] / 4)
claim("GSPO: どのトークンも −Â ξ/|y|", token_grads["GSPO"][0],
      -1.5 * xi[0, y_long].expand(4) / 4)

# %%
from companion.plots import COLOURS, GREY, figure

TINTS = {"GRPO": COLOURS[0], "GSPO": COLOURS[1]}
drawn, ((ax,),) = figure(1, 1, panel=(5.8, 2.7))
places = torch.arange(4)
for shift, name in ((-0.2, "GRPO"), (0.2, "GSPO")):
    ax.bar(places + shift, -token_grads[name][0], 0.38,
           color=TINTS[name], label=name)
ax.set_xticks(places, [f"{t} 番目の「{c}」" for t, c in enumerate("abab", 1)])
ax.set(title="回答 abab のトークンを押し上げる強さ（Â = 1.5）",
       ylabel="損失の勾配 × (−1)", ylim=(0, 0.9))
ax.legend(loc="upper right", ncols=2)
drawn

# %% [markdown]
# クリップも、回答ごとに決まります。 $\xi_i$ が範囲の外（ $\widehat A_i>0$ なら $1+\epsilon$ の上、 $\widehat A_i<0$ なら $1-\epsilon$ の下）に出ると、その回答の **全部のトークン** の勾配が 0 になります。GRPO では、範囲の外に出たトークンだけが 0 になります。
# $\pi_{\theta_{\mathrm{old}}}$ から引いた回答 200 個で、勾配が 0 のトークンを数えます。比べやすいように、 $\epsilon$ はどちらも 0.2 とします。

# %%
from companion.exact import sample


def rows(tokens, y):
    """表 (…, Y, T) から、回答 y (…, n) の行を取り出す。(行, T)"""
    index = y[..., None].expand(*y.shape, tokens.shape[-1])
    return tokens.gather(-2, index).flatten(0, -2)

# %%
y = sample(old_probs, 100, g)  # (X, 100)
mask = world.mask[y].flatten(0, 1)
signs = torch.where(torch.rand(200, generator=g) < 0.5, -1.0, 1.0).double()

# %%
cut = {}
for name, loss_of in (("GRPO", grpo_loss), ("GSPO", gspo_loss)):
    logps = rows(new_tokens, y).requires_grad_()
    loss_of(logps, rows(old_tokens, y), signs, mask, 0.2).backward()
    silent = ((logps.grad == 0) & mask).sum(-1)  # 回答ごとの、0 の数
    cut[name] = (silent > 0) & (silent < mask.sum(-1))
    print(f"{name}: 勾配が 0 のトークン {silent.sum() / mask.sum():.1%}、"
          f"一部だけ 0 の回答 {cut[name].sum()} 個")

# %%
check("GSPO では、回答の一部だけが切られることはない", not cut["GSPO"].any())
check("GRPO ではある", cut["GRPO"].sum() > 20, f"{cut['GRPO'].sum()} 個")

# %% [markdown]
# ### ステップ 3：生成時の方策では、GRPO と同じ勾配
#
# $\theta=\theta_{\mathrm{old}}$ では $w_{i,t}=\xi_i=1$ で、これはクリップの範囲の内側です（ $\epsilon>0$ のとき）。ステップ 2 の重みは、GSPO も GRPO も $1/|y_i|$ になります。
#
# **主張** $\theta=\theta_{\mathrm{old}}$、 $\beta=0$ （KL 項なし）、同じアドバンテージなら、GSPO の勾配は GRPO の勾配に、 $\epsilon$ が何であっても等しくなります。
#
# 回答をトークン数で割らない Dr. GRPO の式 (5.11) や、全部のトークンで平均する DAPO の式 (5.16) とは、アドバンテージをそろえても、回答の長さがまちまちなら、向きまで違います（5.3.2 節、5.3.3 節）。プロンプトごとに $G=8$ 個の回答を引いて確かめます。

# %%
from companion.losses import dapo_loss, dr_grpo_loss, group_advantages

G = 8
y = sample(old_probs, G, g)
rewards = world.random_rewards(g)  # r(x, y)、(X, Y)
advantages = group_advantages(rewards.gather(-1, y).flatten(), G)
mask = world.mask[y].flatten(0, 1)
print("回答の長さ:", mask.sum(-1).tolist())

# %%
METHODS = {
    "GRPO": lambda *batch: grpo_loss(*batch, 0.2),
    "GSPO": lambda *batch: gspo_loss(*batch, 4e-4),
    "GSPO（ε = 0.2）": lambda *batch: gspo_loss(*batch, 0.2),
    "DAPO": lambda *batch: dapo_loss(*batch, 0.2, 0.28),
    "Dr. GRPO": lambda *batch: dr_grpo_loss(*batch, 0.2, 1),
}


def gradient(loss_of, logits, y):
    """回答 y での損失の、表のロジットについての勾配。"""
    theta = logits.clone().requires_grad_()
    logps = rows(world.token_log_probs(theta), y)
    mask = world.mask[y].flatten(0, 1)
    loss = loss_of(logps, rows(old_tokens, y), advantages, mask)
    return torch.autograd.grad(loss, theta)[0]


at_old = {name: gradient(m, old_logits, y) for name, m in METHODS.items()}

# %%
for name in ("GSPO", "GSPO（ε = 0.2）"):
    claim(f"θ_old で {name} = GRPO", at_old[name], at_old["GRPO"], tol=1e-12)


def cosine(a, b):
    return ((a * b).sum() / (a.norm() * b.norm())).item()


for name in ("DAPO", "Dr. GRPO"):
    together = cosine(at_old["GSPO"], at_old[name])
    check(f"{name} とは、向きも違う", together < 0.98,
          f"cos = {together:.3f}")

# %% [markdown]
# 違うのは長さのせいです。長さ 4 の回答だけを引けば、DAPO も（ $1/\sum|y_i|$ ）、定数 4 で割った Dr. GRPO も、同じ勾配になります。

# %%
only_long = old_probs * (lengths == 4)
y_4 = sample(only_long, G, g)
same_length = gradient(METHODS["GSPO"], old_logits, y_4)
claim("長さがそろえば DAPO = GSPO",
      gradient(METHODS["DAPO"], old_logits, y_4), same_length)
claim("長さがそろえば Dr. GRPO ÷ 4 = GSPO",
      gradient(METHODS["Dr. GRPO"], old_logits, y_4) / 4, same_length)

# %% [markdown]
# 方策が $\theta_{\mathrm{old}}$ から離れると、GSPO と GRPO の勾配も離れていきます。クリップが働かない範囲では、その差は、離れた距離に比例して始まります。

# %%
gaps = []
for s in (0.02, 0.01, 0.005):
    moved = old_logits + s * (new_logits - old_logits)
    wide = [gradient(lambda *b, f=f: f(*b, 9.0), moved, y)
            for f in (gspo_loss, grpo_loss)]
    gaps.append((wide[0] - wide[1]).norm() / wide[1].norm())

# %%
halving = [(gaps[0] / gaps[1]).item(), (gaps[1] / gaps[2]).item()]
check("距離を半分にすると、差もほぼ半分", all(1.9 < h < 2.1 for h in halving),
      f"相対差 {gaps[0]:.4f}、比 {halving[0]:.3f}、{halving[1]:.3f}")

# %% [markdown]
# つまり、 $\beta=0$ でアドバンテージが同じなら、GSPO が GRPO と違うのは、**一度生成した回答で何回も更新するとき** の、2 回目からだけです。

# %% [markdown]
# ### ステップ 4：ξ は重要度サンプリングの重みではない
#
# 重要度サンプリングでは、 $\pi_{\theta_{\mathrm{old}}}$ から引いた回答に $\rho=\pi_\theta/\pi_{\theta_{\mathrm{old}}}$ を掛けると、 $\pi_\theta$ での期待値が正しく求まります。 $f(x,y)$ を何でもよい関数として、
#
# $$
# \mathbb{E}_{y\sim\pi_{\theta_{\mathrm{old}}}}[\rho\,f]=\mathbb{E}_{y\sim\pi_\theta}[f],\qquad\mathbb{E}_{y\sim\pi_{\theta_{\mathrm{old}}}}[\rho]=1
# $$
#
# です。 $\xi=\rho^{1/|y|}$ では、どちらも成り立ちません。

# %%
f = rewards
claim("E_old[ρ] = 1", expect(old_probs, product), torch.ones(2))
claim("E_old[ρ f] = E_θ[f]",
      expect(old_probs, product * f), expect(new_probs, f))

# %%
import pandas as pd

pd.DataFrame({
    "E_old[ξ]": expect(old_probs, xi),
    "E_old[ξ f]": expect(old_probs, xi * f),
    "E_old[f]": expect(old_probs, f),
    "E_θ[f]（ほしい値）": expect(new_probs, f),
}, index=["プロンプト 1", "プロンプト 2"]).round(4)

# %%
off_one = (expect(old_probs, xi) - 1).abs()
check("E_old[ξ] ≠ 1", off_one.min() > 1e-3,
      f"ずれ {off_one[0]:.4f}、{off_one[1]:.4f}")
miss = (expect(old_probs, xi * f) - expect(new_probs, f)).abs()
check("E_old[ξ f] ≠ E_θ[f]", miss.min() > 1e-2,
      f"ずれ {miss[0]:.4f}、{miss[1]:.4f}")

# %% [markdown]
# では、 $\xi$ を掛けると、何の期待値になるのでしょう。 $\pi_{\theta_{\mathrm{old}}}\,\xi=\pi_{\theta_{\mathrm{old}}}^{\,1-1/|y|}\,\pi_\theta^{\,1/|y|}$ なので、答えは「2 つの方策を、 $1-1/|y|$ 対 $1/|y|$ で幾何平均した方策 $\pi_\xi$」での期待値に、 $Z=\mathbb{E}_{\theta_{\mathrm{old}}}[\xi]$ を掛けたものです。
#
# $$
# \mathbb{E}_{y\sim\pi_{\theta_{\mathrm{old}}}}[\xi\,f]=Z\;\mathbb{E}_{y\sim\pi_\xi}[f],\qquad
# \pi_\xi(y\mid x)=\frac1Z\,\pi_{\theta_{\mathrm{old}}}(y\mid x)^{1-1/|y|}\,\pi_\theta(y\mid x)^{1/|y|}
# $$

# %%
between = old_probs ** (1 - 1 / lengths) * new_probs ** (1 / lengths)
Z = between.sum(-1)
claim("E_old[ξ] = Z", expect(old_probs, xi), Z)
claim("E_old[ξ f] = Z E_{π_ξ}[f]",
      expect(old_probs, xi * f), Z * expect(between / Z[:, None], f))

# %% [markdown]
# $Z$ は 1 より大きいことも小さいこともあります。長さがそろっていれば、イェンセンの不等式から $Z=\mathbb{E}[\rho^{1/L}]\le\mathbb{E}[\rho]^{1/L}=1$ です（次のステップで確かめます）。
# そろっていなければ、1 を超えることがあります。文字が a だけで、1 トークンで終わる確率が 0.5 から 0.9 に上がった世界では、 $0.9+\sqrt{0.5\times0.1}=1.1236$ です（2 トークンの回答については、 $\rho=0.1/0.5$ の平方根をとります）。

# %%
ending = World(prompts=1, letters=1, max_length=2)  # $、a$、aa


def ends_with(p):
    """はじめに $ を書く確率が p の方策の、トークンの対数確率。"""
    probs = torch.tensor([[[1 - p, p], [0.5, 0.5]]], dtype=torch.float64)
    return ending.token_log_probs(probs.log())

# %%
gap = ends_with(0.9) - ends_with(0.5)
xi_2 = (gap.sum(-1) / ending.mask.sum(-1)).exp()
claim("短い回答が増えると Z > 1", expect(ends_with(0.5).sum(-1).exp(), xi_2),
      0.9 + (0.5 * 0.1) ** 0.5)

# %% [markdown]
# ### ステップ 5：回答が長いほど、ξ は 1 のまわりに集まる
#
# では、 $\xi$ は何の役に立つのでしょう。長さの影響だけを見るために、EOS を書かず、必ず $T=8$ トークン書く方策を考えます（EOS のロジットをごく小さくします）。はじめの $L$ トークンだけを見れば、長さ $L$ の回答だけの世界です。

# %%
T = 8
steady = World(prompts=1, letters=2, max_length=T)
full = slice(-(2**T), None)  # 長さ T の 256 通りが、最後に並んでいる


def without_eos(logits):
    logits = logits.clone()
    logits[..., -1] = -1e4
    return logits

# %%
def tokens_of(logits):
    """EOS を書かない方策の log π(y_t|…)。(…, 256, T)"""
    logps = steady.token_log_probs(without_eos(logits))
    return logps[..., 0, full, :]

# %%
start = 0.5 * steady.random_logits(g)
direction = steady.random_logits(g)
p = tokens_of(start).sum(-1).exp()  # π_old(y)
claim("Σ_y π_old(y) = 1", p.sum(), 1.0)


def log_w_at(scale):
    """方策を direction の向きに scale だけ動かしたときの log w。"""
    return tokens_of(start + scale * direction) - tokens_of(start)

# %%
def mean(values):
    return (p * values).sum()


def variance(values):
    return mean((values - mean(values)) ** 2)

# %% [markdown]
# まず、すぐ分かることを 3 つ確かめます。
#
# - 長さがそろっていれば、 $\log\xi$ の分散は、和 $\sum_t\log w_t$ の分散の $1/L^2$ です。
# - $\log\xi$ の平均は、**1 トークンあたりの KL** の符号を逆にしたもの、 $-D_{\mathrm{KL}}[\pi_{\theta_{\mathrm{old}}}\|\pi_\theta]/L$ です。
# - 長さがそろっていれば $\mathbb{E}_{\theta_{\mathrm{old}}}[\xi]\le1$ です（ステップ 4）。

# %%
from companion.exact import kl

log_w = log_w_at(0.4)
log_xi = log_w.mean(-1)
claim("Var log ξ = Var(Σ log w)/L²",
      variance(log_xi), variance(log_w.sum(-1)) / T**2)

# %%
whole_old, whole_new = (steady.log_probs(without_eos(logits))
                        for logits in (start, start + 0.4 * direction))
claim("E_old[log ξ] = −KL(π_old‖π_θ)/L",
      mean(log_xi), -kl(whole_old, whole_new)[0] / T)
check("E_old[ξ] < 1", mean(log_xi.exp()) < 0.99,
      f"{mean(log_xi.exp()):.4f}")

# %% [markdown]
# では、和の分散は、長さとともにどう増えるでしょう。手がかりは、どの接頭辞 $s$ のあとでも、トークンの比の期待値が 1 になることです。
#
# $$
# \mathbb{E}_{v\sim\pi_{\theta_{\mathrm{old}}}(\cdot\mid s)}\left[\frac{\pi_\theta(v\mid s)}{\pi_{\theta_{\mathrm{old}}}(v\mid s)}\right]=\sum_v\pi_\theta(v\mid s)=1
# $$

# %%
before, after = (without_eos(logits).log_softmax(-1)
                 for logits in (start, start + 0.4 * direction))
claim("どの接頭辞のあとでも E_old[w] = 1",
      (before.exp() * (after - before).exp()).sum(-1),
      torch.ones(1, steady.num_prefixes))

# %% [markdown]
# ずれが小さければ $\log w\approx w-1$ なので、 $\log w_t$ の期待値は、それまでに何を書いていても、ほぼ 0 です。前のトークンを知っていても、次の $\log w_t$ の平均は予想できません。したがって、トークンの対数比は **互いにほぼ無相関** です。
#
# **主張** 回答が $\pi_{\theta_{\mathrm{old}}}$ から引かれ、 $\pi_\theta$ がその回答とは別に決まっているなら、ずれが小さい極限で、和の分散は分散の和です。どのトークンの分散も $\sigma^2$ なら、 $\mathrm{Var}\log\xi=\sigma^2/L$ になります。

# %%
apart = {}
for scale in (0.4, 0.2, 0.1, 0.05, 0.025):
    log_w = log_w_at(scale)
    each = sum(variance(log_w[:, t]) for t in range(T))
    ratio = variance(log_w.sum(-1)) / each
    apart[scale] = (1 - ratio).abs().item()
    print(f"scale {scale:5.3f}: 和の分散 / 分散の和 = {ratio:.4f}")

# %%
steps = list(apart.values())
check("ずれを半分にするたびに、1 との差もほぼ半分になる",
      all(0.4 < b / a < 0.6 for a, b in zip(steps, steps[1:], strict=False)))

# %% [markdown]
# ずれの大きさによらず、ちょうど $\sigma^2/L$ になるのは、トークンの分布が接頭辞によらないときです。a と b を半々に書く方策から、a を 0.6、b を 0.4 で書く方策へ動かしてみます。 $\log w$ は $\log1.2$ か $\log0.8$ なので、 $\sigma=\frac12\log\frac{1.2}{0.8}$ です。
# このときは、積 $\rho$ の分散も閉じた形で書けて、長さとともに **指数的に** 増えます。

# %%
letter = steady.tokens[full]  # 0 が a、1 が b
n = torch.arange(1, T + 1, dtype=torch.float64)


def by_length(log_w, probs):
    """長さ 1〜T での、log ξ と log ρ の標準偏差、ρ の分散。"""
    def var(x):
        average = (probs[:, None] * x).sum(0)
        return (probs[:, None] * (x - average) ** 2).sum(0)

    sums = log_w.cumsum(-1)
    return var(sums / n).sqrt(), var(sums).sqrt(), var(sums.exp())

# %%
import math

coins = torch.full((2**T,), 0.5**T, dtype=torch.float64)
log_w_coin = torch.tensor([1.2, 0.8], dtype=torch.float64).log()[letter]
sd_xi, _, var_product = by_length(log_w_coin, coins)
sigma = math.log(1.2 / 0.8) / 2
claim("Var log ξ = σ²/L（L = 1〜8）", sd_xi**2, sigma**2 / n)
second_moment = 0.5 * 1.2**2 + 0.5 * 0.8**2  # E[w²] = 1.04
claim("Var ρ = E[w²]^L − 1（L = 1〜8）", var_product, second_moment**n - 1)

# %% [markdown]
# 無相関でない例も作れます。1 文字目が a のときだけ、2 文字目からの a の確率が 0.5 から 0.99 へ変わり、b のときは何も変わらないとします。ずれが大きいので $\log w\approx w-1$ が成り立たず、2 文字目からの $\log w_t$ の平均が、1 文字目で決まってしまいます（a なら $\frac12\log(4\times0.99\times0.01)\approx-1.6$、b なら 0）。
# $\log\xi$ の広がりは 0 に近づかず、2 つの平均の差の半分に近づきます。

# %%
log_w_style = torch.tensor([1.98, 0.02], dtype=torch.float64).log()
log_w_style = log_w_style[letter]
log_w_style = log_w_style * (letter[:, :1] == 0)  # 1 文字目が a のときだけ
log_w_style[:, 0] = 0.0
style_xi, _, _ = by_length(log_w_style, coins)
limit = -math.log(4 * 0.99 * 0.01) / 4
check("無相関でなければ、1/√L では縮まない", style_xi[-1] > limit,
      f"L = 8 で {style_xi[-1]:.3f}、L → ∞ で {limit:.3f}")

# %%
random_xi, random_product, _ = by_length(log_w_at(0.4), p)
token_sd = torch.stack([variance(x).sqrt() for x in log_w_at(0.4).T])
drawn, (axes,) = figure(1, 2, panel=(4.6, 3.2))
for values, colour, label in (
    (random_product, COLOURS[4], "log ρ（和）"),
    (token_sd, COLOURS[0], "L 番目の log w"),
    (random_xi, COLOURS[1], "log ξ（平均）"),
):
    axes[0].plot(n, values, color=colour, label=label)
typical = token_sd.square().cumsum(0).div(n).sqrt()
axes[0].plot(n, typical / n.sqrt(), ":", color=GREY, label="無相関なら")
axes[0].set(title="乱数で動かした方策", ylim=(0, 1.15))
axes[1].plot(n[1:], style_xi[1:], color=COLOURS[1], label="log ξ（平均）")
axes[1].axhline(limit, color=GREY, linestyle=":", label="L → ∞")
axes[1].set(title="1 文字目で決まる方策", ylim=(0, 1.9), xlim=(0.65, 8.35))
for ax in axes:
    ax.set(xlabel="回答の長さ L", ylabel="標準偏差（nat）")
    ax.legend(loc="upper left" if ax is axes[0] else "lower right")
drawn

# %%
near_root = random_xi / (typical / n.sqrt())
check("左: log ξ の広がりは点線から 1 割以内で、4 トークン目からは縮む",
      (near_root - 1).abs().max() < 0.1 and (random_xi[2:].diff() < 0).all(),
      f"点線の {near_root.min():.3f}〜{near_root.max():.3f} 倍")

# %% [markdown]
# 左の図の灰色の点線は、トークンの分散（青）だけから「無相関なら」と計算した $\log\xi$ の広がりで、実際の値とほぼ重なります。動いた大きさがトークンごとに違うので、はじめは $\log\xi$ も広がりますが、4 トークン目からは縮んでいきます。和のほうは、広がりつづけます。
# 主張には条件がありました。「 $\pi_\theta$ がその回答とは別に決まっている」。ある回答で更新したあとの方策で、その同じ回答の比をとると、成り立ちません（その回答のトークンがいっせいに上がったり下がったりするからです）。実験 1 で、言語モデルの両方の場合を測ります。

# %% [markdown]
# ### ステップ 6：偏りと分散のトレードオフ
#
# 方策オフの回答から、いまの方策での勾配 $\nabla J=\mathbb{E}_{y\sim\pi_\theta}[\widehat A\,\nabla\log\pi_\theta(y)]$ を見積もりたいとします。次の 4 つの推定量を比べます。長さは $L$ にそろえ、クリップはしません。
#
# | 推定量 | 一つの回答からの値 |
# |---|---|
# | 積 $\rho$ | $\widehat A\,\rho\,\sum_t\nabla\log\pi_\theta(y_t\mid\cdot)$ |
# | トークンの比（GRPO の形） | $\widehat A\,\sum_t w_t\,\nabla\log\pi_\theta(y_t\mid\cdot)$ |
# | 系列の比（GSPO の形） | $\widehat A\,\xi\,\sum_t\nabla\log\pi_\theta(y_t\mid\cdot)$ |
# | 直さない | $\widehat A\,\sum_t\nabla\log\pi_\theta(y_t\mid\cdot)$ |
#
# 報酬は「a の割合」、 $\widehat A$ はそれから $\pi_\theta$ での期待値を引いたものとします。期待値も分散も、数え上げて正確に計算できます。方策の組を 8 通り作ります。図の線は 8 通りの中央値、帯は最小値から最大値まで（図の外に出るところもあります）、「方策オン」は $\pi_\theta$ から引いたときです。

# %%
olds = 0.5 * steady.random_logits(g, 8)
news = olds + 0.5 * steady.random_logits(g, 8)


def cut_at(tokens, L):
    """長さ L の世界の、2^L 通りの回答。(…, 2^L, L)"""
    return tokens[..., :: 2 ** (T - L), :L]


def moments(weights, probs, A, logps, theta):
    """A Σ_t c_t ∇log π の期待値（表）と、分散（全成分の和）。"""
    value = (probs * A * (weights * logps).sum(-1)).sum()
    (mean,) = torch.autograd.grad(value, theta, retain_graph=True)
    after = without_eos(theta.detach()).softmax(-1)[:, 0]
    at = cut_at(steady.prefixes[full], logps.shape[-1])
    # トークンごとに表の別の行に効くので、‖·‖² は各行の和になる
    norms = 1 - 2 * logps.detach().exp() + (after**2).sum(-1)[:, at]
    second = (probs * A**2 * (weights**2 * norms).sum(-1)).sum(-1)
    return mean, second - (mean**2).sum((-3, -2, -1))

# %%
def compare(L):
    """各推定量の、相対的な偏りと、方策オンの分散に対する比。"""
    theta = news.clone().requires_grad_()
    logps, old = cut_at(tokens_of(theta), L), cut_at(tokens_of(olds), L)
    log_w = (logps - old).detach()
    p_old, p_new = old.sum(-1).exp(), logps.detach().sum(-1).exp()
    share = (cut_at(letter, L) == 0).double().mean(-1)
    A = share - (p_new * share).sum(-1, keepdim=True)
    ones = torch.ones_like(log_w)
    target, on_policy = moments(ones, p_new, A, logps, theta)
    size = (target**2).sum((-3, -2, -1))
    results = {"on": on_policy / size}
    for name, c in (("積 ρ", log_w.sum(-1, keepdim=True).exp() * ones),
                    ("トークンの比", log_w.exp()),
                    ("系列の比 ξ", log_w.mean(-1, keepdim=True).exp() * ones),
                    ("直さない", ones)):
        found, spread = moments(c, p_old, A, logps, theta)
        bias = ((found - target) ** 2).sum((-3, -2, -1)) / size
        results[name] = bias.sqrt(), spread / on_policy
    return results

# %%
trade = {L: compare(L) for L in range(1, T + 1)}
NAMES = ("積 ρ", "トークンの比", "系列の比 ξ", "直さない")
bias, noise = (
    {name: torch.stack([trade[L][name][k] for L in trade], -1)
     for name in NAMES} for k in (0, 1)
)  # それぞれ (8, T)
claim("積 ρ の推定量に偏りはない", bias["積 ρ"], torch.zeros(8, T))

# %%
from companion.plots import spread

drawn, (axes,) = figure(1, 2, panel=(4.7, 3.2))
tints = dict(zip(NAMES, (COLOURS[4], *COLOURS[:2], GREY), strict=True))
for ax, lines, title, limits in (
    (axes[0], bias, "偏りの大きさ ÷ ‖∇J‖", (-0.05, 1.25)),
    (axes[1], noise, "分散 ÷ 方策オンの分散", (0.2, 2.3)),
):
    ax.set_ylim(*limits)
    for name in NAMES:
        spread(n, lines[name], label=name, ax=ax, colour=tints[name],
               title=title, xlabel="回答の長さ L")
drawn

# %%
at_8 = {name: (bias[name][:, -1], noise[name][:, -1]) for name in NAMES}
xi_bias, no_bias = at_8["系列の比 ξ"][0], at_8["直さない"][0]
check("L = 8 の ξ の偏りは、0 ではないが「直さない」より小さい（8 通りとも）",
      (xi_bias < no_bias - 0.02).all() and xi_bias.min() > 0.2,
      f"中央値 {xi_bias.quantile(0.5):.2f} と {no_bias.quantile(0.5):.2f}")

# %%
noisy = {name: v.quantile(0.5).item() for name, (_, v) in at_8.items()}
check("分散の中央値は、積がいちばん大きく、ξ は方策オンに近い",
      noisy["積 ρ"] > noisy["系列の比 ξ"] + 0.3
      and noisy["系列の比 ξ"] < 1.25,
      "、".join(f"{name} {v:.2f}" for name, v in noisy.items()))

# %% [markdown]
# 積は偏りませんが、分散が長さとともに増えます。 $\xi$ の分散は、方策オンとあまり変わりません。その代わりに偏ります。 $\xi$ が直すのは、 $\pi_{\theta_{\mathrm{old}}}$ から $\pi_\theta$ までの道のりの、およそ $1/L$ だけだからです（ステップ 4 の $\pi_\xi$ ）。長い回答では、「直さない」に近づきます。ずれが小さいときに、期待値がどれだけ直るかを確かめましょう。

# %%
def corrected(L, scale=0.01):
    """a の割合の期待値の差のうち、ξ が直す分。"""
    log_rho = cut_at(log_w_at(scale), L).sum(-1)
    q = cut_at(tokens_of(start), L).sum(-1).exp()
    share = (cut_at(letter, L) == 0).double().mean(-1)
    weighted = q * (log_rho / L).exp()
    near = (weighted * share).sum() / weighted.sum()
    there, here = (q * log_rho.exp() * share).sum(), (q * share).sum()
    return ((near - here) / (there - here)).item()

# %%
parts = {L: corrected(L) for L in (2, 4, 8)}
check("直るのは、差の 1/L", all(abs(part * L - 1) < 0.1
                                for L, part in parts.items()),
      "、".join(f"L = {L}: {part:.3f}" for L, part in parts.items()))

# %%
closer = (at_8["トークンの比"][0] < xi_bias).sum().item()
print(f"L = 8 で、トークンの比の偏りが ξ より小さい方策の組: {closer} / 8")

# %% [markdown]
# トークンの比も、同じくらい偏ります。偏りの大小は、方策の組や報酬によって入れ替わります（演習 3）。分散は、この世界では $\xi$ より大きくありません。論文は「トークンの比は分散の大きい雑音を溜める」と述べていますが、勾配の分散を正確に計算したこの例では、そうはなりませんでした。
#
# $N$ 個の回答で平均すると、平均二乗誤差は「偏り² + 分散 ÷ $N$」です。回答が少なければ分散が、多ければ偏りが効きます。表は $L=8$ での値を $\lVert\nabla J\rVert^2$ で割ったもの（8 通りの中央値）です。

# %%
on = trade[T]["on"]
errors = pd.DataFrame({
    f"N = {N:,}": {name: (bias[name][:, -1] ** 2
                          + noise[name][:, -1] * on / N).quantile(0.5).item()
                   for name in NAMES} for N in (16, 256, 4_096)
})

# %%
few, many = errors["N = 16"], errors["N = 4,096"]
check("16 個なら、積は ξ より悪い", few["積 ρ"] > 1.1 * few["系列の比 ξ"])
check("4,096 個なら、積がいちばん良い", many.idxmin() == "積 ρ")
errors.round(3)

# %% [markdown]
# ### ステップ 7：ε = 4e-4 は何を切るのか
#
# サポートページの $\epsilon$ は、GRPO では 0.2、GSPO では 0.0004 です。500 倍も違うのはなぜでしょう。
# ステップ 5 から、長さ $L$ の回答の $\log\xi$ は、平均 $-D$ （ $D$ は 1 トークンあたりの KL）、標準偏差 $\sigma/\sqrt L$ くらいで散らばります。たとえばトークンの $\sigma$ が 0.0126、回答が 1,000 トークンなら、 $\sigma/\sqrt L=0.0126/\sqrt{1000}\approx4\times10^{-4}$ です。このとき、平均による縮みは $\sqrt{1000}\approx32$ 倍で、500 倍の残りは、0.2 が $\sigma$ よりずっと広く、トークンをほとんど切らない幅だからです。
#
# 長い回答を数え上げることはできませんが、ステップ 5 のコイン（a と b が半々の方策から、a の確率が $0.5+\delta$ の方策へ）なら、a の数が二項分布に従うので、どんな長さでも正確に計算できます。

# %%
def outside(L, delta, epsilon):
    """長さ L のコインの世界で、ξ が [1 − ε, 1 + ε] の外に出る確率。"""
    k = torch.arange(L + 1, dtype=torch.float64)  # a の数
    whole = torch.tensor(L + 1.0, dtype=torch.float64)
    log_p = (torch.lgamma(whole) - torch.lgamma(k + 1)
             - torch.lgamma(whole - k) - L * math.log(2))
    log_xi = (k * math.log1p(2 * delta)
              + (L - k) * math.log1p(-2 * delta)) / L
    return log_p.exp()[(log_xi.exp() - 1).abs() > epsilon].sum().item()

# %%
log_xi = log_w_coin.mean(-1)
claim("二項分布 = 256 通りの数え上げ（L = 8）", outside(T, 0.1, 0.1),
      coins[(log_xi.exp() - 1).abs() > 0.1].sum())

# %%
LENGTHS = [round(10 ** (k / 8)) for k in range(37)]  # 1〜31,623
shares = {d: [outside(L, d, 4e-4) for L in LENGTHS]
          for d in (0.0015, 0.0063, 0.025)}

# %%
drawn, ((ax,),) = figure(1, 1, panel=(6.4, 3.2))
for (d, share), alpha in zip(shares.items(), (0.3, 0.6, 1), strict=True):
    ax.plot(LENGTHS, share, color=COLOURS[1], alpha=alpha,
            label=f"σ = {2 * d:g}（1 トークンの KL {2 * d * d:.1e}）")
ax.set(title="ξ が [1 − ε, 1 + ε] の外に出る割合（ε = 4e-4）",
       xscale="log", xlabel="回答の長さ L（対数目盛り）", ylim=(-0.03, 1.55),
       yticks=torch.linspace(0, 1, 6))
ax.legend(loc="upper right")
drawn

# %%
check("トークンの σ が小さければ、長い回答は切られなくなる",
      shares[0.0063][-1] < 0.01 < 0.5 < shares[0.0063][0],
      f"σ = 0.0126: {shares[0.0063][0]:.2f} → {shares[0.0063][-1]:.4f}")
check("1 トークンあたりの KL が ε を超えると、長い回答はほぼ全部外に出る",
      shares[0.025][-1] > 0.99, f"σ = 0.05: {shares[0.025][-1]:.4f}")
ratio_5 = math.exp(math.log1p(2 * 0.025))
check("トークンの比は、どれも ε = 0.2 の内側", ratio_5 - 1 < 0.2,
      f"最大 {ratio_5:.3f}")

# %% [markdown]
# 短いところのぎざぎざは、a の数が整数だからです。長い回答の極限では、 $\xi$ は $e^{-D}$ に集まります。GSPO の $\epsilon$ は、そこでは **1 トークンあたりの KL がおよそ $\epsilon$ を超えたか** というしきい値として働きます（実際に勾配が 0 になるのは、 $\widehat A<0$ の回答です。ふつう、更新に使っていない長い回答の $\xi$ は 1 より小さいからです）。
# 逆に、短い回答や、1 回の更新が大きい学習では、 $\epsilon=4\times10^{-4}$ は最初の 1 回の更新のあと、もう多くの回答を切ります。 $\epsilon$ は、回答の長さと更新の大きさに合わせて選ぶ値なのです。実験で、もう一度見ます。

# %% [markdown]
# ## 実装
#
# 式 (5.22)、(5.24)、(5.25) を、そのまま NumPy で書きます。引数は、回答ごとの「トークンの対数確率の列」です。回答の長さはまちまちなので、リストに入れて渡します。トークンのない回答は、0 として数えます。

# %%
import numpy as np


def xi_numpy(logps_i, old_logps_i):
    """式 (5.22)"""
    total = 0.0
    for t in range(len(logps_i)):
        total += logps_i[t] - old_logps_i[t]
    return np.exp(total / len(logps_i))


def gspo_loss_numpy(logps, old_logps, advantages, epsilon):
    total = 0.0
    for i in range(len(logps)):
        if len(logps[i]) == 0:
            continue
        xi, A = xi_numpy(logps[i], old_logps[i]), advantages[i]
        clipped = min(max(xi, 1 - epsilon), 1 + epsilon)
        total += min(xi * A, clipped * A)  # 式 (5.24)
    return -total / len(logps)  # 式 (5.25) の符号を逆にしたもの

# %% [markdown]
# パッケージの `gspo_loss` は、同じ式をベクトルで書いた PyTorch 版です（説明の文は省いて表示します）。入力の検査のあと、最後の 4 行が式です。
# トークンの対数比を作る `token_log_ratios` （パディングでは 0）と、クリップの `clipped_surrogate` は、GRPO や DAPO と共通です。GSPO だけが、クリップの前に、回答ごとに平均します。

# %%
import inspect
import re

from companion.losses.surrogate import clipped_surrogate

for function in (gspo_loss, clipped_surrogate):
    code = inspect.getsource(function)
    print(re.sub(r'    """.*?"""\n', "", code, flags=re.DOTALL))

# %% [markdown]
# 長さの違う 6 つの回答（一つは空です）で、2 つの実装を比べます。 $\epsilon$ は、切られる回答と切られない回答の両方が出る 0.05 と、サポートページの 0.0004 です。

# %%
rng = np.random.default_rng(0)
sizes = [5, 1, 8, 0, 3, 6]
logps_list = [-rng.exponential(2.0, size=k) for k in sizes]
old_list = [row + 0.2 * rng.normal(size=len(row)) for row in logps_list]
A_6 = np.array([1.2, -0.4, -0.9, 0.5, 0.8, -1.2])

# %%
def padded(lists):
    table = torch.full((6, 8), torch.nan, dtype=torch.float64)
    for i, row in enumerate(lists):
        table[i, : len(row)] = torch.from_numpy(row)
    return table  # パディングは NaN。結果に入ってはいけない値


logps_6, old_6 = padded(logps_list), padded(old_list)
mask_6 = ~logps_6.isnan()

# %%
for epsilon in (0.05, 4e-4):
    claim(f"NumPy = PyTorch（ε = {epsilon}）",
          gspo_loss_numpy(logps_list, old_list, A_6, epsilon),
          gspo_loss(logps_6, old_6, torch.from_numpy(A_6), mask_6, epsilon),
          tol=1e-12)

# %% [markdown]
# 勾配は、数値微分と比べます（ `gradcheck` ）。生成時の方策には、勾配は流れません。パディングの勾配は 0 です。

# %%
leaf = logps_6.nan_to_num(0.0).requires_grad_()
old_leaf = old_6.nan_to_num(0.0).requires_grad_()
A_tensor = torch.from_numpy(A_6)
matches = torch.autograd.gradcheck(
    lambda logps: gspo_loss(logps, old_leaf, A_tensor, mask_6, 0.05), leaf)
check("自動微分の勾配 = 数値微分の勾配", matches)

# %%
gspo_loss(leaf, old_leaf, A_tensor, mask_6, 0.05).backward()
check("生成時の方策にも、パディングにも勾配は流れない",
      old_leaf.grad is None and not leaf.grad[~mask_6].any())

# %% [markdown]
# 手計算とも合わせておきましょう。一つ目は、対数比 0.1 のトークンが 4 つ（パディングは 4 つ）で、 $\xi=e^{0.1}=1.105171$ です。 $\widehat A=1$、 $\epsilon=4\times10^{-4}$ なら、1.0004 に切られます。
# 二つ目は対数比が $+1$ と $-1$ で、平均は 0、 $\xi=1$ です。三つ目は、対数比 0.01 のトークンが 100 個です。

# %%
def one_response(log_w, pads=0, epsilon=9.0, A=1.0):
    """対数比が log_w の、一つの回答の目的関数の値。"""
    row = torch.tensor([[*log_w, *[5.0] * pads]], dtype=torch.float64)
    real = torch.tensor([[1] * len(log_w) + [0] * pads])
    return -gspo_loss(row, torch.zeros_like(row),
                      torch.tensor([A], dtype=row.dtype), real, epsilon)

# %%
claim("対数比 0.1 が 4 つ", one_response([0.1] * 4, pads=4),
      1.105170918075648, tol=1e-12)
claim("ε = 4e-4 で切る", one_response([0.1] * 4, 4, 4e-4), 1.0004, tol=1e-12)
claim("対数比 +1 と −1", one_response([1.0, -1.0]), 1.0, tol=1e-12)
claim("対数比 0.01 が 100 個", one_response([0.01] * 100),
      1.010050167084168, tol=1e-12)

# %% [markdown]
# 長さが 2 と 0、アドバンテージが $+1$ と $-1$、 $\xi=1$ なら、空の回答は 0 として数えるので、損失は $-(1+0)/2=-0.5$ です。

# %%
nothing = torch.zeros(2, 2, dtype=torch.float64)
empty_row = torch.tensor([[1, 1], [0, 0]])
plus_minus = torch.tensor([1.0, -1.0], dtype=torch.float64)
claim("空の回答は 0", -0.5,
      gspo_loss(nothing, nothing, plus_minus, empty_row, 4e-4), tol=1e-12)

# %% [markdown]
# $\widehat A<0$ の側では、大きな $\xi$ はクリップでは抑えられません。float32 では $\log\xi$ が 88.7 を超えると $\xi$ が無限大になるので、パッケージの関数は、場所を示すエラーにします。 $\widehat A>0$ なら $1+\epsilon$ に切られるだけで、勾配も 0 です。
# トークンの対数比が極端でも、平均が小さければ、GSPO では問題になりません。

# %%
flat = torch.zeros(1, 2)
huge = torch.tensor([[200.0, 2.0]]).requires_grad_()  # 平均 101
loss = gspo_loss(huge, flat, torch.ones(1), torch.ones(1, 2), 4e-4)
loss.backward()
claim("Â > 0: 1 + ε に切られ、勾配は 0", [loss.item(), *huge.grad[0]],
      [-1.0004, 0.0, 0.0], tol=1e-6)
try:
    gspo_loss(huge, flat, -torch.ones(1), torch.ones(1, 2), 4e-4)
except ValueError as error:
    message = str(error)
check("Â < 0: エラー", "at [0] is 101" in message, message)

# %%
balanced = torch.tensor([[200.0, -200.0]])
loss = gspo_loss(balanced, flat, -torch.ones(1), torch.ones(1, 2), 4e-4)
claim("対数比 +200 と −200 の ξ は 1", loss, 1.0, tol=1e-6)

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じ回答で、損失と勾配を比べる
#
# 相手は TRL の `GRPOTrainer` そのものです。SFT 済みの小さなモデル（float64）を生成時の方策とし、その重みを少し動かしたものを、いまの方策とします。
# 回答はこちらで決め、TRL に「生成した回答」として渡します。プロンプトは 3 つ、 $G=4$ で、回答の長さはまちまち、一つは EOS のない、打ち切られた回答です。

# %%
from companion.lm import load

old_model, tokenizer = load("prime-sums", dtype=torch.float64)
model, _ = load("prime-sums", dtype=torch.float64)
noise_g = torch.Generator().manual_seed(0)
with torch.no_grad():
    for q in model.parameters():
        q += 0.003 * torch.randn(q.shape, generator=noise_g, dtype=q.dtype)

# %%
answers = {
    "20未満の素数の合計は？": {"77$": 1, "78$": 0, "7$": 0, "75": 0},
    "30未満の素数の合計は？": {"129$": 1, "130$": 0, "1$": 0, "127$": 0.5},
    "50未満の素数の合計は？": {"328$": 1, "329$": 1, "3$": 0, "281$": 1},
}  # $ は EOS、数は報酬


def token_ids(texts):
    ends = [text.replace("$", tokenizer.eos_token) for text in texts]
    return tokenizer(ends)["input_ids"]

# %%
prompt_ids = token_ids([x for x in answers for _ in answers[x]])
completion_ids = token_ids([y for ys in answers.values() for y in ys])
scores = [float(r) for ys in answers.values() for r in ys.values()]
print("回答の長さ:", [len(ids) for ids in completion_ids])

# %% [markdown]
# `trl_grpo` は、TRL のトレーナーを、この一つのバッチについて動かし、損失・勾配・アドバンテージと、作られたバッチを返す関数です。
# 方策オフの比を計算させるために、 `num_iterations=2`（一度生成した回答で 2 回更新する）とします。1 回目の更新のあと、モデルが `old_model` から `model` に変わったところです。

# %%
from companion.oracle import trl_grpo

SEQUENCE = dict(num_generations=4, loss_type="grpo", beta=0.0,
                importance_sampling_level="sequence", scale_rewards="group")


def ask_trl(lm, **config):
    return trl_grpo(lm, old_model, old_model, prompt_ids, completion_ids,
                    scores, tokenizer, **(SEQUENCE | config))

# %%
from companion.lm import token_log_probs


def ours(lm, answer, epsilon):
    """こちらの損失と、全パラメータについての勾配。"""
    batch, mask = answer.batch, answer.batch["completion_mask"]
    with torch.no_grad():
        old_logps = token_log_probs(old_model, **batch)
    loss = gspo_loss(token_log_probs(lm, **batch), old_logps,
                     answer.advantages.double(), mask, epsilon)
    names, parameters = zip(*lm.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return loss.item(), dict(zip(names, gradients, strict=True))


def by_numpy(lm, answer, epsilon):
    batch = answer.batch
    lists = [[row[m.bool()].detach().numpy() for row, m in
              zip(token_log_probs(q, **batch), batch["completion_mask"],
                  strict=True)] for q in (lm, old_model)]
    A = answer.advantages.double().numpy()
    return gspo_loss_numpy(*lists, A, epsilon)

# %%
cases = {
    "方策オフ、ε = 0.2": (model, 2, 0.2),
    "方策オフ、ε = 0.01": (model, 2, 0.01),
    "方策オフ、ε = 4e-4": (model, 2, 4e-4),
    "方策オン、ε = 4e-4": (old_model, 1, 4e-4),
}
table, seen = {}, {}
for name, (lm, iterations, epsilon) in cases.items():
    theirs = ask_trl(lm, num_iterations=iterations, epsilon=epsilon)
    loss, gradients = ours(lm, theirs, epsilon)
    gap = max((gradients[k] - theirs.gradients[k]).abs().max().item()
              for k in gradients)
    check(f"{name}: 全パラメータの勾配が一致", gap <= 1e-12,
          f"最大差 {gap:.0e}")
    table[name] = by_numpy(lm, theirs, epsilon), loss, theirs.loss.item()
    seen[name] = theirs

# %%
parity = pd.DataFrame(table, index=["NumPy", "torch", "TRL"]).T
differ = parity.max(axis=1) - parity.min(axis=1)
check("NumPy = torch = TRL", differ.max() <= 1e-12,
      f"最大差 {differ.max():.0e}")
parity = parity.map("{:.12f}".format)
parity["最大差"] = differ.map("{:.0e}".format)
parity["切られた割合"] = [f"{answer.metrics['clip_ratio/region_mean']:.3f}"
                          for answer in seen.values()]
parity

# %%
signs_seen = seen["方策オフ、ε = 0.01"].metrics
check("照合の回答には、上で切られるものも、下で切られるものもある",
      min(signs_seen["clip_ratio/high_mean"],
          signs_seen["clip_ratio/low_mean"]) > 0)

# %% [markdown]
# プロンプトの長さはそろえました。長さが違うと、TRL は左のパディングも位置に数え、位置の埋め込み（RoPE の角度）は float32 で計算されるので、1e-7 ほどの差が出るからです。アドバンテージは、TRL が float32 で計算した値を使いました。
#
# ### サポートページのコードを CPU で動かす
#
# サポートページの `GRPOTrainer` の例を、ノート PC の CPU で動かします。報酬関数もサポートページのものです。

# %%
from datasets import Dataset

train_dataset = Dataset.from_list([
    {
        "prompt": "20未満の素数の合計は？",  # 変更 1
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

# %%
trainer = GRPOTrainer(
    model=str(checkpoint("prime-sums")),
    processing_class=tokenizer,
    reward_funcs=reward_func,
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(),  # 変更 2
        num_generations=4,
        per_device_train_batch_size=4,
        loss_type="grpo",
        importance_sampling_level="sequence",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.0004,
        max_completion_length=8,  # 変更 3
        bf16=torch.cuda.is_available(),  # 変更 4
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,  # 表に出すために、毎回記録します
    ),
    train_dataset=train_dataset,
)
first_run = train(trainer)
first_run[["step", "reward", "loss", "clip_ratio/region_mean"]]

# %%
check("損失は 0 と表示され、切られた回答はない",
      first_run["loss"].abs().max() < 1e-6
      and (first_run["clip_ratio/region_mean"] == 0).all())

# %% [markdown]
# 変えたのは 4 か所です（ほかに、 `trainer.train()` の代わりにパッケージの `train` を使い、毎回記録するようにしました）。かならず要るのは 4 つ目だけです。
#
# 1. **プロンプトを短くしました。** 小さなモデルは、この形の問いだけで学んでいます。
# 2. **出力先は、一時フォルダにします。**
# 3. **回答の長さの上限を、8 トークンにしました。** 既定値では、EOS を書き損ねた回答がずっと続きます。
# 4. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
#
# $\beta=0$ なので、参照方策は要りません（読み込まれません）。
#
# 損失が 0 なのは、学んでいないからではありません。方策オンでは $\xi=1$ なので、損失は $-\frac1B\sum_i\widehat A_i$、つまりグループごとに足すと 0 です。勾配のほうは、トークンごとに $-\widehat A_i/(B\,|y_i|)$ で、0 ではありません。GSPO（と GRPO）では、損失ではなく、報酬と勾配のノルムを見てください。

# %%
logps = torch.zeros(4, 4, dtype=torch.float64).requires_grad_()
real = torch.arange(4) < torch.tensor([4, 1, 2, 3])[:, None]
A_4 = group_advantages(torch.tensor([1.0, 0, 0, 0]).double(), 4)
loss = gspo_loss(logps, logps, A_4, real, 4e-4)
loss.backward()
claim("方策オンの損失は 0", loss, 0.0)
claim("方策オンの勾配は −Â/(G|y|)", logps.grad,
      -(A_4 / (4 * torch.tensor([4, 1, 2, 3]).double()))[:, None] * real)

# %% [markdown]
# ### サポートページの設定では、GSPO は GRPO と同じ学習になる
#
# 上の表で、切られた割合（ `clip_ratio/region_mean` ）は、どの更新でも 0 でした。サポートページの設定では、回答を一度生成するたびに、1 回だけ更新します。更新するときの方策は生成したときの方策と同じで、 $\xi$ はいつも 1 です（TRL は、このとき `old_per_token_logps` を計算もせず、いまの値で代用します）。
# ステップ 3 の主張から、 $\epsilon$ は何であっても同じで、GRPO（ $\beta=0$ ）とも同じ勾配になります。1 回の生成で 32 個の回答を書かせ、学習率を上げて 4 回更新し、確かめます。

# %%
from companion.tasks import PRIME_SUMS, problems

SMALL = dict(
    num_generations=8, per_device_train_batch_size=32, max_steps=4,
    learning_rate=5e-4, max_completion_length=8, logging_steps=1, beta=0.0,
    bf16=False, use_cpu=True, report_to="none", save_strategy="no",
    gradient_checkpointing=False, seed=2,
)


def short_run(level, epsilon, **changes):
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), importance_sampling_level=level,
        epsilon=epsilon, **(SMALL | dict(loss_type="grpo") | changes))
    return train(GRPOTrainer(
        str(checkpoint("prime-sums")), reward_func, args=config,
        processing_class=tokenizer,
        train_dataset=problems(PRIME_SUMS, 100, seed=0)))

# %%
one_update = {
    "GSPO（ε = 4e-4）": short_run("sequence", 4e-4),
    "GSPO（ε = 0.2）": short_run("sequence", 0.2),
    "GRPO（ε = 0.2）": short_run("token", 0.2),
    "DAPO": short_run("token", 0.2, loss_type="dapo", epsilon_high=0.28),
}

# %%
norms = pd.DataFrame({name: run["grad_norm"].to_numpy()
                      for name, run in one_update.items()})
norms.index = [f"{k} 回目" for k in range(1, 5)]
norms.rename_axis("勾配のノルム").round(5)

# %%
page = norms["GSPO（ε = 4e-4）"]
for name in ("GSPO（ε = 0.2）", "GRPO（ε = 0.2）"):
    away = (norms[name] / page - 1).abs().max()
    check(f"{name} と、4 回とも同じ", away < 1e-4, f"相対差 {away:.0e}")
away = abs(norms["DAPO"].iloc[0] / page.iloc[0] - 1)
check("DAPO とは、1 回目から違う", away > 0.01, f"相対差 {away:.3f}")
clips = max(run["clip_ratio/region_mean"].max()
            for run in one_update.values())
check("切られた割合は、どれも 0", clips == 0)

# %% [markdown]
# GSPO らしい学習をするには、一度生成した回答を、何回かの更新に使います。TRL には 2 つの方法があります。
#
# - `steps_per_generation=4` ：生成した回答を 4 つに分け、順に 1 つずつ使って 4 回更新します（論文の設定です）。
# - `num_iterations=4` ：生成した回答の全部を、4 周使います。
#
# 間違えやすいのは `gradient_accumulation_steps` です。これだけを 4 にすると、4 つに分けて計算した勾配を足して、1 回だけ更新します。 $\xi$ は 1 のままです。

# %%
quarter = dict(per_device_train_batch_size=8)
stale = {
    "gradient_accumulation_steps=4": short_run(
        "sequence", 4e-4, gradient_accumulation_steps=4, **quarter),
    "steps_per_generation=4": short_run(
        "sequence", 4e-4, steps_per_generation=4, **quarter),
    "num_iterations=4": short_run("sequence", 4e-4, num_iterations=4),
}

# %%
clip_table = pd.DataFrame({name: run["clip_ratio/region_mean"].to_numpy()
                           for name, run in stale.items()})
clip_table.index = norms.index
clip_table.T.rename_axis("切られた回答の割合").round(3)

# %%
accumulated, split, repeated = clip_table.to_numpy().T
check("勾配蓄積だけでは、切られない", (accumulated == 0).all())
check("ほかの 2 つでは、1 回目は 0、2 回目からは切られる",
      split[0] == repeated[0] == 0
      and min(split[1:].min(), repeated[1:].min()) > 0)

# %% [markdown]
# ### 式と TRL の違い
#
# **loss_type は "grpo" です。** 既定値は "dapo" で、 `importance_sampling_level="sequence"` と組み合わせると、回答ごとの値 $\widehat W_i$ を **トークンの数だけ** 足して、全トークン数で割ります。式 (5.25) ではなく、長い回答ほど重い平均です（TRL は警告を出します）。"luspo" は、わざと長さを掛ける別の手法です。
# 先ほどのバッチ（方策オフ、 $\epsilon=0.01$ ）で比べます。TRL の警告は、リスト `warned` に集めます。

# %%
import logging

warned = []
listener = logging.Handler()
listener.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("trl.trainer.grpo_trainer").handlers = [listener]
logging.getLogger("trl.trainer.grpo_trainer").propagate = False

# %%
kinds = {"grpo": seen["方策オフ、ε = 0.01"]}
for kind in ("dapo", "dr_grpo", "luspo"):
    kinds[kind] = ask_trl(model, num_iterations=2, epsilon=0.01,
                          loss_type=kind, max_completion_length=16)

# %%
theirs = kinds["grpo"]
mask = theirs.batch["completion_mask"]
with torch.no_grad():
    log_w = (token_log_probs(model, **theirs.batch)
             - token_log_probs(old_model, **theirs.batch))
A_12 = theirs.advantages.double()
xi_12 = ((log_w * mask).sum(-1) / mask.sum(-1)).exp()
W = torch.minimum(xi_12 * A_12, xi_12.clamp(0.99, 1.01) * A_12)

# %%
tokens_12 = mask.sum(-1)
for kind, value in (
    ("grpo", W.mean()),
    ("dapo", (W * tokens_12).sum() / tokens_12.sum()),
    ("dr_grpo", (W * tokens_12).sum() / (12 * 16)),
    ("luspo", (W * tokens_12).mean()),
):
    claim(f"{kind}", kinds[kind].loss, -value, tol=1e-12)

# %%
differences = {"切られた割合（1 世代に 1 回だけ更新）": f"{clips:g}"}
differences["loss_type（grpo、dapo、dr_grpo、luspo）の損失"] = "、".join(
    f"{answer.loss:.5f}" for answer in kinds.values())
check("TRL の警告", any("loss sums per-token" in text for text in warned),
      next(text for text in warned if "sums per-token" in text)[:76] + "…")

# %% [markdown]
# **空の回答** TRL では、 `mask_truncated_completions=True` にすると、打ち切られた回答の全部のトークンが損失から外れ、長さ 0 の回答と同じになります。サポートページの計算（対数比から損失までの数行）では、その回答は $\xi=e^0=1$ として $\widehat A_i$ が平均に入りますが、TRL（と `gspo_loss` ）では 0 です。勾配には関係しませんが、表示される損失が変わります。

# %%
masked = ask_trl(old_model, num_iterations=1, epsilon=4e-4,
                 mask_truncated_completions=True)
real = masked.batch["completion_mask"]
A = masked.advantages.double()
no_change = torch.zeros_like(real, dtype=torch.float64)
page_log_xi = (no_change * real).sum(-1) / real.sum(-1).clamp(min=1)
page_loss = -(page_log_xi.exp() * A).mean()
claim("TRL = gspo_loss", masked.loss,
      gspo_loss(no_change, no_change, A, real, 4e-4), tol=1e-12)
check("サポートページの計算とは違う", abs(masked.loss - page_loss) > 0.01)
differences["打ち切りを外したときの損失（TRL、サポートページ）"] = (
    f"{masked.loss:.5f}、{abs(page_loss):.5f}")

# %% [markdown]
# **切られた割合は、数えるものが違います。** `clip_ratio` は、"token" ではトークンの割合、"sequence" では回答の割合です。同じバッチ、同じ $\epsilon=0.01$ でも、数は一致しません。

# %%
by_token = ask_trl(model, num_iterations=2, epsilon=0.01,
                   importance_sampling_level="token")
share_token, share_sequence = (
    answer.metrics["clip_ratio/region_mean"] for answer in (by_token, theirs))

# %%
def beyond(ratio, A):
    return (ratio > 1.01) & (A > 0) | (ratio < 0.99) & (A < 0)


cut_tokens = beyond(log_w.exp(), A_12[:, None]) & (mask == 1)
claim("トークンの割合", share_token, cut_tokens.sum() / mask.sum(), tol=1e-6)
cut_rows = beyond(xi_12, A_12)
claim("回答の割合", share_sequence, cut_rows.double().mean(), tol=1e-6)
differences["切られた割合（トークン、回答）"] = (
    f"{share_token:.3f}、{share_sequence:.3f}")

# %% [markdown]
# **上下の幅** サポートページの $\epsilon$ は、上下とも 0.0004 です。論文の実験では、下が 0.0003、上が 0.0004 でした。TRL では `epsilon=3e-4, epsilon_high=4e-4` と書きます（ `epsilon_high` を書かなければ、上下同じです）。
#
# **標準偏差** 式 (5.23) の分母は、TRL では、 $G-1$ で割る標準偏差に $10^{-4}$ を足したものです。

# %%
narrow = ask_trl(model, num_iterations=2, epsilon=3e-4, epsilon_high=4e-4)
both = [answer.loss.item()
        for answer in (seen["方策オフ、ε = 4e-4"], narrow)]
check("下の幅で、損失が変わる", abs(both[0] - both[1]) > 1e-6)
differences["ε の下側（4e-4、3e-4）での損失"] = "、".join(
    f"{value:.6f}" for value in both)
claim("報酬 1, 0, 0, 0 のアドバンテージ", theirs.advantages[:4],
      [0.75 / (0.5 + 1e-4), *[-0.25 / (0.5 + 1e-4)] * 3], tol=1e-6)
differences["報酬 1, 0, 0, 0 の Â"] = "、".join(
    f"{value:.4f}" for value in theirs.advantages[:2])

# %% [markdown]
# **大きすぎる ξ** サポートページの計算では、 $\log\xi>88.7$ （float32）で $\xi$ が無限大になり、 $\widehat A>0$ でクリップされていても、勾配が NaN になります。 `gspo_loss` の勾配は 0 でした。 $\widehat A<0$ なら、 `gspo_loss` はエラーにします（「実装」）。

# %%
leaf = torch.tensor([89.0], requires_grad=True)
ratio = leaf.exp()
torch.minimum(ratio, ratio.clamp(1 - 4e-4, 1 + 4e-4)).sum().backward()
check("サポートページの計算の勾配は NaN", leaf.grad.isnan().all())
differences["log ξ = 89、Â > 0 の勾配（サポートページ、gspo_loss）"] = (
    f"{leaf.grad.item()}、0")

# %% [markdown]
# 最後に、既定値を並べます。既定のままでは、 `GRPOTrainer` は GSPO になりません。

# %%
defaults = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False)
for name in ("importance_sampling_level", "loss_type", "epsilon", "beta",
             "num_iterations", "steps_per_generation", "learning_rate",
             "num_generations", "max_completion_length"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、TRL の `GRPOTrainer` で学習させます。課題はサポートページと同じ素数の合計（「20未満の素数の合計は？」、 $n=3$ から 102 までの 100 問）です。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。貪欲法（いちばん確率の高い文字を選びつづける）では、ほとんど正解します。サンプリングすると、半分以上まちがえます。
# 100 問は学習でも評価でも同じで、モデルは答えを覚えているだけです。強化学習は、ここでは新しい計算を教えるのではなく、「知っている答え」に確率を集めます。

# %%
from dataclasses import asdict

from companion.training import preset

gspo_preset = preset("gspo")
pd.DataFrame([asdict(gspo_preset)])

# %% [markdown]
# `batch_size` は、1 回の更新に使う回答の数です。その 4 倍を一度に生成し、4 回の更新に使います。 $\epsilon$ などの切り替えは、サポートページのままです。

# %%
def train_group(level="sequence", epsilon=4e-4, **changes):
    settings = dict(
        loss_type="grpo", importance_sampling_level=level, epsilon=epsilon,
        scale_rewards="group", beta=gspo_preset.beta, temperature=1.0,
        max_completion_length=PRIME_SUMS.max_new_tokens,
        **gspo_preset.arguments(steps_per_generation=4, logging_steps=1),
    )
    trainer = GRPOTrainer(
        model=str(checkpoint("prime-sums", gspo_preset.size)),
        processing_class=tokenizer, reward_funcs=reward_func,
        args=GRPOConfig(**(settings | changes)),
        train_dataset=problems(PRIME_SUMS, gspo_preset.examples, seed=0),
    )
    return trainer, train(trainer)


trainer, history = train_group()

# %%
sampling = ("temperature", "top_p", "top_k", "max_completion_length",
            "num_generations", "steps_per_generation", "num_iterations")
{name: getattr(trainer.args, name) for name in sampling}

# %% [markdown]
# 1 回の生成（**世代** と呼びます）で 4 回更新するので、記録も 4 回ずつ平均します。

# %%
from matplotlib.ticker import MaxNLocator

from companion.plots import curves


def by_generation(history):
    """4 回の更新を 1 世代にまとめた記録。"""
    generations = history.groupby((history["step"] - 1) // 4).mean()
    return generations.assign(step=generations.index + 1)


def curves_of(history, panels):
    drawn = curves(by_generation(history), panels, xlabel="世代")
    for ax in drawn.axes:
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return drawn


# %%
curves_of(history, {
    "報酬の平均": "reward",
    "グループ内の報酬の標準偏差": "reward_std",
    "全部同じ報酬のグループの割合": "frac_reward_zero_std",
})

# %%
curves_of(history, {
    "切られた回答の割合": {"上で": "clip_ratio/high_mean",
                           "下で": "clip_ratio/low_mean"},
    "勾配のノルム": "grad_norm",
    "エントロピー（nat/トークン）": "entropy",
    "回答の長さ（トークン）": "completions/mean_length",
    "打ち切られた割合": "completions/clipped_ratio",
    "損失": "loss",
})

# %% [markdown]
# 報酬は上がり、エントロピーは下がり、回答の長さはほとんど変わりません。全部同じ報酬のグループ（アドバンテージが 0 で、何も学べないグループ）は増えていきます。KL 項がないので、KL は記録されません。損失は、世代で平均すると、はじめから 0 のすぐ近くにあり、学習の進み具合を表していません。
# 切られた割合を、世代の中の何番目の更新かで分けてみます。

# %%
place = (history["step"] - 1) % 4 + 1
by_place = history.groupby(place)["clip_ratio/region_mean"].mean()
by_place.index = [f"{k} 番目" for k in by_place.index]
by_place.to_frame("切られた回答の割合").T.round(3)

# %%
first, *later = by_place
check("1 番目の更新では、切られない", first == 0)
check("2 番目からは、多くが切られる", min(later) > 0.4,
      "、".join(f"{share:.2f}" for share in later))

# %%
at_first = history["loss"][place == 1].abs()
check("1 番目の更新の損失は、0 ではない", at_first.median() > 1e-3,
      f"大きさの中央値 {at_first.median():.3f}")
averaged = by_generation(history)["loss"].abs().max()
check("世代で平均すると、ほぼ 0", averaged < 0.03, f"最大 {averaged:.4f}")

# %% [markdown]
# 1 番目の更新では $\xi=1$ なのに、損失は 0 ではありませんでした。TRL は、生成した回答を **混ぜてから** 4 つに分けるので、グループの回答が別々の更新に入り、 $\widehat A_i$ の和が 0 にならないのです（アドバンテージは、混ぜる前にグループごとに計算されています）。
# 2 番目からは、たった 1 回の更新で、多くの回答が $\epsilon=4\times10^{-4}$ の外に出ています。回答が数トークンと短く、学習率も大きいからだと考えられます（ステップ 7）。切られる向きは $\widehat A$ の符号と合うときだけなので、外に出た回答の全部が切られるわけではありません。

# %%
from companion.lm import generate, measure
from companion.plots import before_after

sft_model, _ = load("prime-sums", gspo_preset.size)
prompts = PRIME_SUMS.test_prompts
trained_model = trainer.model
score_before, score_after = (
    measure(lm, tokenizer, PRIME_SUMS, prompts, samples=8)
    for lm in (sft_model, trained_model))

# %%
titles = {"sampled": "サンプリング", "greedy": "貪欲法"}
before_after({title: (score_before[k], score_after[k])
              for k, title in titles.items()}, limits=(0, 1), title="正解率")

# %%
check("学習前: 貪欲法は正解、サンプリングは半分以上まちがい",
      score_before["greedy"] > 0.95 and score_before["sampled"] < 0.5)
gain = score_after["sampled"] - score_before["sampled"]
check("サンプリングの正解率が大きく上がった", gain > 0.25, f"+{gain:.3f}")
check("貪欲法の正解率は、ほとんどそのまま", score_after["greedy"] > 0.9,
      f"{score_after['greedy']:.3f}")

# %%
samples = {}
for name, lm in (("学習前", sft_model), ("学習後", trained_model)):
    ys = generate(lm, tokenizer, prompts[17:92:10], max_new_tokens=8,
                  temperature=1.0)
    samples[name] = [f"{y} {'○' if y == PRIME_SUMS.answer(x) else '×'}"
                     for x, y in zip(prompts[17:92:10], ys, strict=True)]
pd.DataFrame(samples, index=prompts[17:92:10])

# %% [markdown]
# ## 実験
#
# ### 実験 1：比の広がりと、回答の長さ
#
# ステップ 5 の主張を、言語モデルで確かめます。長い回答がほしいので、まだ何も学んでいない（重みが乱数の）モデルに、64 文字の文字列を 128 個書かせます。意味のない文字列ですが、比の広がりを見るには十分です。EOS では止めません。
# 報酬は「ひらがなの割合」、 $G=8$ です。128 個を 4 つに分け、はじめの 3 つで 1 回ずつ、合わせて 3 回更新します。そして、
#
# - **まだ使っていない回答** （4 つ目の 32 個。 `steps_per_generation=4` の最後の更新が見るもの）
# - **更新に使った回答** （はじめの 96 個。 `num_iterations` を 2 以上にしたときの 2 周目が見るもの）
#
# のそれぞれについて、対数比を測ります。更新そのものは GRPO（ $\epsilon=0.2$ ）で行います。どの長さ、どの $\epsilon$ も、同じ更新で比べるためです。乱数の種（シード）は 5 つで、図の線は中央値、帯は最小値から最大値までです。

# %%
import copy

from companion.lm import new_model

LONG, WRITTEN = 64, 128
kana = token_ids(["".join(map(chr, range(0x3041, 0x3095)))])[0]
question = torch.tensor(token_ids(["20未満の素数の合計は？"] * WRITTEN))
AT = question.shape[1]  # 回答は、ここから始まる


def write(lm, seed):
    """64 トークンの回答を 128 個書かせる。"""
    torch.manual_seed(seed)
    ids = lm.generate(
        input_ids=question, attention_mask=torch.ones_like(question),
        max_new_tokens=LONG, do_sample=True, top_k=0, top_p=1.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=[],
    ).clone()
    attention = torch.ones_like(ids)
    completion = attention.clone()
    completion[:, :AT] = 0
    return dict(input_ids=ids, attention_mask=attention,
                completion_mask=completion)

# %%
def updated(start_lm, batch, lr):
    """3 回の更新のあとの対数比 (128, 64) と、アドバンテージ。"""
    lm = copy.deepcopy(start_lm)
    share = torch.isin(batch["input_ids"][:, AT:], torch.tensor(kana))
    advantages = group_advantages(share.double().mean(-1), G)
    with torch.no_grad():
        old_logps = token_log_probs(lm, **batch)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, weight_decay=0.0)
    for part in torch.arange(WRITTEN).chunk(4)[:3]:
        mine = {name: value[part] for name, value in batch.items()}
        loss = grpo_loss(token_log_probs(lm, **mine), old_logps[part],
                         advantages[part], mine["completion_mask"], 0.2)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        log_w = token_log_probs(lm, **batch) - old_logps
    return log_w[:, AT:].double(), advantages

# %%
SEEDS = range(5)
beginners = [new_model(seed=seed) for seed in SEEDS]
texts = [write(lm, seed) for seed, lm in enumerate(beginners)]
after_3 = [updated(lm, batch, lr=5e-4)
           for lm, batch in zip(beginners, texts, strict=True)]
unseen, used = slice(96, None), slice(96)
print("文字列の例:", tokenizer.decode(texts[0]["input_ids"][0, AT:AT + 24]))

# %%
points = torch.tensor([1, 2, 4, 8, 16, 32, 64])


def sd_by_length(rows_of):
    """長さごとの標準偏差。それぞれ (シード, 長さ)。"""
    lines = {"log ρ（和）": [], "log w（トークン）": [], "log ξ（平均）": []}
    for log_w, _ in after_3:
        sums = log_w[rows_of].cumsum(-1)[:, points - 1]
        lines["log ρ（和）"].append(sums.std(0))
        lines["log ξ（平均）"].append((sums / points).std(0))
        lines["log w（トークン）"].append(torch.stack(
            [log_w[rows_of, :m].std() for m in points]))
    return {name: torch.stack(rows) for name, rows in lines.items()}


widths = {"まだ使っていない回答": sd_by_length(unseen),
          "更新に使った回答": sd_by_length(used)}

# %%
drawn, (axes,) = figure(1, 2, panel=(4.9, 3.4))
three = (COLOURS[4], COLOURS[0], COLOURS[1])
for ax, (title, lines) in zip(axes, widths.items(), strict=True):
    ax.set(xscale="log", yscale="log", ylim=(0.008, 14))
    for (name, values), colour in zip(lines.items(), three, strict=True):
        spread(points, values, label=name, ax=ax, colour=colour,
               title=title, xlabel="回答の長さ L（対数目盛り）",
               ylabel="標準偏差（nat、対数目盛り）", yscale="log")
    expected = lines["log w（トークン）"] / points.sqrt()
    ax.plot(points, expected.quantile(0.5, 0), ":", color=GREY)
    ax.set_xticks(points, [str(m) for m in points.tolist()], minor=False)
    ax.minorticks_off()
drawn

# %% [markdown]
# 灰色の点線は $\sigma/\sqrt L$ です。左では、 $\log\xi$ の広がりは点線とほぼ重なり、和 $\log\rho$ は $\sqrt L$ くらいで広がります。トークンどうしは同じパラメータを使い、前の文字に依存しますが、無相関という主張に要るのは、回答が $\pi_{\theta_{\mathrm{old}}}$ から引かれ、更新とは別で、ずれが小さいことだけでした。
# 右は違います。更新に使った回答では、 $\widehat A_i>0$ の回答のトークンは上がりやすく、 $\widehat A_i<0$ の回答のトークンは下がりやすいので、一つの回答の中では対数比の向きがそろい、平均しても縮みません。

# %%
def against_root(lines):
    """L = 64 での、log ξ の広がりと σ/√L の比。(シード,)"""
    return (lines["log ξ（平均）"] / lines["log w（トークン）"])[:, -1] * 8

# %%
fresh_ratio, used_ratio = (against_root(lines) for lines in widths.values())
check("まだ使っていない回答では、σ/√L の 0.5〜1.5 倍（5 シードとも）",
      fresh_ratio.min() > 0.5 and fresh_ratio.max() < 1.5,
      f"{fresh_ratio.min():.2f}〜{fresh_ratio.max():.2f} 倍")
check("更新に使った回答では、3 倍以上（5 シードとも）",
      used_ratio.min() > 3,
      f"{used_ratio.min():.1f}〜{used_ratio.max():.1f} 倍")

# %%
def with_advantage(rows_of):
    """対数比の平均が、Â と同じ符号の回答の割合。(シード,)"""
    return torch.stack([(log_w[rows_of].mean(-1) * A[rows_of] > 0).double()
                        .mean() for log_w, A in after_3])

# %%
fresh_side, used_side = with_advantage(unseen), with_advantage(used)
check("使った回答は、ほとんどが Â の符号の向きに動いた（5 シードとも）",
      used_side.min() > 0.85 and fresh_side.max() < 0.8,
      f"{used_side.min():.2f} 以上、まだ使っていない回答では "
      f"{fresh_side.min():.2f}〜{fresh_side.max():.2f}")

# %%
last = {name: values[:, -1] for name, values in
        widths["まだ使っていない回答"].items()}
middle = {name: v.quantile(0.5).item() for name, v in last.items()}
print("L = 64 での中央値:", {name: round(v, 3) for name, v in middle.items()})

# %% [markdown]
# ### 実験 2：ε は、何割を切るのか
#
# 同じ回答（64 トークン）について、 $\epsilon$ を変えたとき、切られるトークンの割合（GRPO）と、切られる回答の割合（GSPO）を数えます。 $\widehat A>0$ なら $1+\epsilon$ の上、 $\widehat A<0$ なら $1-\epsilon$ の下に出たものです。

# %%
EPSILONS = torch.logspace(-5, 0, 61, dtype=torch.float64)


def clipped_share(ratio, A, epsilons):
    """ε ごとの、切られる割合。ratio と A は同じ形状。"""
    beyond = torch.where(A > 0, ratio - 1, 1 - ratio)[A != 0]
    return torch.stack([(beyond > e).double().mean() for e in epsilons])


def both_shares(log_w, A, rows_of, epsilons):
    log_w, A = log_w[rows_of], A[rows_of]
    by_token = clipped_share(log_w.exp(), A[:, None].expand_as(log_w),
                             epsilons)
    return by_token, clipped_share(log_w.mean(-1).exp(), A, epsilons)

# %%
drawn, (axes,) = figure(1, 2, panel=(4.9, 3.1))
for ax, rows_of, title in zip(axes, (unseen, used), widths, strict=True):
    found = [both_shares(*run, rows_of, EPSILONS) for run in after_3]
    for k, colour in enumerate(TINTS.values()):
        spread(EPSILONS, torch.stack([run[k] for run in found]), ax=ax,
               colour=colour, title=title, xlabel="ε（対数目盛り）",
               ylabel="切られる割合")
    for line, name in zip(ax.lines, TINTS, strict=True):
        line.set_label(name)
    ax.legend(loc="lower left")
    for epsilon, name in ((0.2, "GRPO"), (4e-4, "GSPO")):
        ax.axvline(epsilon, color=TINTS[name], linestyle=":", linewidth=1.2)
    ax.set(xscale="log", ylim=(-0.02, 1.02))
drawn

# %% [markdown]
# 縦の点線は、サポートページの $\epsilon$ （GRPO 0.2、GSPO 0.0004）です。左では、同じ割合を切る $\epsilon$ が、GSPO では GRPO よりずっと小さくなります。広がりがおよそ $1/\sqrt{64}=1/8$ に縮むからです（比べる割合によって、ちょうど 8 倍にはなりません）。右の、更新に使った回答では、広がりがあまり縮まないので、同じ割合を切る $\epsilon$ も近くなります。

# %%
def epsilon_at(share, level, rows_of):
    """ちょうど share の割合が切られる ε。（全シードをまとめて）"""
    found = torch.stack([both_shares(*run, rows_of, EPSILONS)[level]
                         for run in after_3]).mean(0)
    return EPSILONS[(found > share).sum() - 1].item()


for title, rows_of, low, high in (("まだ使っていない回答", unseen, 4, 16),
                                  ("更新に使った回答", used, 0.5, 2)):
    by_level = [epsilon_at(0.2, level, rows_of) for level in (0, 1)]
    times = by_level[0] / by_level[1]
    check(f"{title}: 2 割を切る ε は、GRPO が GSPO の {times:.1f} 倍",
          low < times < high, f"{by_level[0]:.3f} と {by_level[1]:.3f}")

# %% [markdown]
# では、 $\epsilon=4\times10^{-4}$ がちょうどよいのは、どんなときでしょう。学習率を変えて、まだ使っていない回答で数えます（1 シード。表の右の 2 列が、切られる割合です）。TRL の既定の学習率は $10^{-6}$ です。

# %%
PAGE = torch.tensor([0.2, 4e-4], dtype=torch.float64)
lr_table = {}
for lr in (1e-6, 1e-5, 1e-4, 1e-3):
    log_w, A = updated(beginners[0], texts[0], lr)
    token_share, row_share = both_shares(log_w, A, unseen, PAGE)
    lr_table[f"{lr:g}"] = {
        "sd(log w)": log_w[unseen].std().item(),
        "sd(log ξ)": log_w[unseen].mean(-1).std().item(),
        "GRPO（ε = 0.2）": token_share[0].item(),
        "GSPO（ε = 4e-4）": row_share[1].item(),
    }
lr_table = pd.DataFrame(lr_table).T.rename_axis("学習率")
lr_table.map("{:.2g}".format)

# %%
low, *_, high = lr_table["GSPO（ε = 4e-4）"]
check("学習率が小さければ何も切られず、大きければ半分ほど切られる",
      low < 0.05 and high > 0.35, f"{low:.2f} と {high:.2f}")
widths_lr = lr_table["sd(log ξ)"].to_numpy()
grows = widths_lr[1:] / widths_lr[:-1]
check("log ξ の広がりは、1e-4 までは学習率に比例する",
      abs(grows[:2] / 10 - 1).max() < 0.2 and grows[2] > 3,
      "、".join(f"{times:.1f} 倍" for times in grows))

# %% [markdown]
# 学習率が $10^{-4}$ までは、学習率が 10 倍になれば、方策のずれも $\log\xi$ の広がりも、およそ 10 倍になります。 $\epsilon$ は、ずれの大きさと回答の長さの両方に合わせて決める値で、0.0004 という数そのものに意味があるわけではありません。ほかの人の設定から学習率や回答の長さを変えるときは、 `clip_ratio` を見て選び直すことになります。

# %% [markdown]
# ### 実験 3：古い回答で何度も更新すると
#
# もう一度「数え上げられる世界」に戻ります。プロンプトは 4 つ、回答は最長 6 トークンで、127 通りの回答のうち、およそ 15 % が正解です。方策は表形式で、16 のシードで、方策も正解も別々に決めます。
# 学習を崩れやすくするために、採点を 2 割の確率で間違え、一度生成した回答（ $G=8$ ）で 16 回更新します。そのたびに古くなる回答を、クリップがどれだけ抑えるかを見ます。最適化は Adam です。
#
# 全シードの損失を一つにまとめて平均しますが、シードどうしはパラメータを共有しないので、それぞれ独立に学習します。

# %%
SEEDS_6 = 16
world_6 = World(prompts=4, letters=2, max_length=6)
g = torch.Generator().manual_seed(0)
start_6 = world_6.random_logits(g, SEEDS_6)
start_6[..., -1] -= 1.0  # EOS を書きにくくし、少し長い回答にする
right = torch.rand(SEEDS_6, 4, len(world_6.responses), generator=g) < 0.15
right = right.double()
at_start = expect(world_6.log_probs(start_6).exp(), right)
print(f"はじめの正解の確率: 平均 {at_start.mean():.3f}")

# %%
TABLES = torch.arange(SEEDS_6 * 4).reshape(SEEDS_6, 4, 1, 1)


def cells(y):
    """回答 y の各トークンの、1 列に並べたロジットの表での番号。"""
    row = TABLES * world_6.num_prefixes + world_6.prefixes[y]
    return (row * 3 + world_6.tokens[y]).flatten(0, -2)  # 3 は a、b、EOS


def collect(theta, noise, scale, g):
    """回答を 8 つずつ引いて採点する。全回答の確率と、更新に使うデータ。"""
    with torch.no_grad():
        tokens = world_6.token_log_probs(theta)
    probs = tokens.sum(-1).exp()
    y = sample(probs, G, g)
    r = right.gather(-1, y)
    wrong_score = torch.rand(r.shape, generator=g) < noise
    r = torch.where(wrong_score, 1 - r, r).flatten()
    return probs, cells(y), (rows(tokens, y), group_advantages(r, G, scale),
                             world_6.mask[y].flatten(0, -2))

# %%
def fit(loss_of, scale="group", updates=16, generations=24, noise=0.2,
        lr=0.1):
    """世代ごとの回答の確率 (世代, シード, プロンプト, 回答) を返す。"""
    theta = start_6.clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=lr)
    g = torch.Generator().manual_seed(1)
    trace = []
    for _ in range(generations + 1):
        probs, at, batch = collect(theta, noise, scale, g)
        trace.append(probs)
        for _ in range(updates):
            logps = theta.log_softmax(-1).flatten()[at]
            optimizer.zero_grad()
            loss_of(logps, *batch).backward()
            optimizer.step()
    return torch.stack(trace)

# %%
NO_CLIP = 1e4
WIDTHS = {"トークン": (grpo_loss, (0.02, 0.05, 0.1, 0.2, NO_CLIP)),
          "系列": (gspo_loss, (4e-4, 0.02, 0.05, 0.1, 0.2, NO_CLIP))}
runs = {(level, epsilon): expect(fit(lambda *b, f=f, e=epsilon: f(*b, e)),
                                 right)
        for level, (f, widths_of) in WIDTHS.items() for epsilon in widths_of}

stability = pd.DataFrame({
    key: {"12 世代目": run[12].mean().item(),
          "24 世代目": run[-1].mean().item(),
          "最低のシード": run[-1].mean(-1).min().item(),
          "崩れた割合": (run[-1] < 0.05).double().mean().item()}
    for key, run in runs.items()}).T
stability.index = stability.index.set_levels(
    ["なし" if e == NO_CLIP else f"{e:g}"
     for e in stability.index.levels[1]], level=1)
stability.rename_axis(["クリップ", "ε"]).round(3)

# %% [markdown]
# 「12 世代目」「24 世代目」は正解の確率の期待値（16 シード × 4 プロンプトの平均）、「崩れた割合」は、64 の問題（シードとプロンプトの組）のうち、最後の正解の確率が 0.05 を割ったものの割合です。間違いの回答だけに確率が集まると、正解がもう引かれないので、抜け出せなくなると考えられます。

# %%
drawn, (axes,) = figure(1, 2, panel=(4.9, 3.5))
for key, label, colour in (
    (("トークン", 0.2), "トークン 0.2", COLOURS[0]),
    (("系列", 0.05), "系列 0.05", COLOURS[1]),
    (("トークン", NO_CLIP), "クリップなし", GREY),
):
    spread(range(25), runs[key].mean(-1).T, label=label, ax=axes[0],
           colour=colour, title="正解の確率", xlabel="世代（16 回ずつ更新）")
ticks = stability.loc["系列"].index.tolist()
for level, colour in (("トークン", COLOURS[0]), ("系列", COLOURS[1])):
    part = stability.loc[level]
    for column, style in (("12 世代目", "o--"), ("24 世代目", "o-")):
        axes[1].plot([ticks.index(e) for e in part.index], part[column],
                     style, color=colour, label=f"{level}、{column}",
                     linewidth=1.4, markersize=4)
axes[1].set_xticks(range(len(ticks)), ticks)
axes[1].set(title="クリップの幅と、正解の確率（16 シードの平均）",
            xlabel="ε", ylim=(0.35, 1.02))
axes[1].legend(loc="lower left", ncols=2, fontsize=9)
drawn

# %%
broken = {key: (run[-1] < 0.05).double().mean().item()
          for key, run in runs.items()}
check("クリップがないと、どちらも 4 分の 1 以上が崩れる",
      min(broken["トークン", NO_CLIP], broken["系列", NO_CLIP]) > 0.25,
      f"{broken['トークン', NO_CLIP]:.2f} と {broken['系列', NO_CLIP]:.2f}")
check("ε = 0.2 どうしなら、崩れる割合は同じくらい",
      abs(broken["トークン", 0.2] - broken["系列", 0.2]) < 0.08,
      f"{broken['トークン', 0.2]:.2f} と {broken['系列', 0.2]:.2f}")

# %%
tight, usual = runs["系列", 4e-4], runs["トークン", 0.2]
check("系列 4e-4 は崩れない。その代わり、立ち上がりは遅い",
      broken["系列", 4e-4] < 0.05 < broken["トークン", 0.2]
      and tight[6].mean() < usual[6].mean() - 0.05,
      f"6 世代目で {tight[6].mean():.2f} と {usual[6].mean():.2f}")

# %%
halfway = stability["12 世代目"]
tokens_best = halfway["トークン"].max()
check("12 世代目: 系列 0.05 は、どの ε のトークンのクリップよりも先にいる",
      halfway["系列", "0.05"] > tokens_best + 0.01,
      f"{halfway['系列', '0.05']:.3f} と、トークンの最高 {tokens_best:.3f}")
ahead = (runs["系列", 0.05] - runs["トークン", 0.1])[-1].mean(-1)
errors_apart = (ahead.mean() / (ahead.std() / SEEDS_6**0.5)).item()
check("24 世代目: 系列 0.05 とトークン 0.1 の差は、はっきりしない",
      ahead.min() < 0 < ahead.max() and errors_apart < 3,
      f"{ahead.min():+.2f}〜{ahead.max():+.2f}、"
      f"平均は標準誤差の {errors_apart:.1f} 倍")

# %% [markdown]
# いちばん大きな差は、クリップがあるかないか、そして $\epsilon$ が狭いか広いかです。狭いクリップは崩れるのを防ぎますが、そのぶん遅くなります。GSPO の「安定」の大部分は、ここでは狭い $\epsilon$ によるものです。同じ $\epsilon=0.2$ なら、GSPO のほうが安定とは言えません。
# それでも、ちょうどよい $\epsilon$ （ここでは 0.05）の系列のクリップは、12 世代目では、どの $\epsilon$ のトークンのクリップよりも、平均では先に進んでいました。たどり着く先の差は、シードによって符号が違い、はっきりしません。 $\epsilon$ も同じシードで選んでいますし、一つの課題、一つの最適化法での結果です。論文が報告している安定性は、MoE（mixture of experts）の大きなモデルで、長い回答を学習させたときのもので、ここでは確かめられません。

# %% [markdown]
# ### 実験 4：GRPO、Dr. GRPO、DAPO、GSPO を同じ課題で比べる
#
# 最後に、5.3 節の 4 つの手法を、同じ課題、同じ乱数、同じ予算で比べます。
#
# - **数え上げられる世界**：実験 3 の課題で、採点は正しくします。60 世代、1 世代に 4 回更新、16 シード。
# - **言語モデル**：「学習」と同じ素数の合計を、同じ設定（1 世代に 4 回更新）で、TRL で 1 回ずつ。
#
# 手法の設定はサポートページのものです。世界では、GSPO の $\epsilon$ を 0.05 に広げたもの（「広い ε」）も加えます（言語モデルでは、演習 4 で試してください）。Dr. GRPO のアドバンテージは標準偏差で割りません。DAPO は、トークン平均と上の広いクリップだけで、動的サンプリングと長さの罰は入れません。
#
# DAPO の分母（トークンの総数）はシードごとに数えます。目的関数はアドバンテージの正の定数倍に比例するので、シードごとにアドバンテージを割っておけば、一つの呼び出しで計算できます。

# %%
def dapo_by_seed(logps, old_logps, advantages, mask):
    tokens = mask.sum(-1).unflatten(0, (SEEDS_6, -1)).sum(-1)
    weights = (tokens.double().mean() / tokens).repeat_interleave(4 * G)
    return dapo_loss(logps, old_logps, advantages * weights, mask, 0.2, 0.28)


FOUR = {
    "GRPO": (lambda *b: grpo_loss(*b, 0.2), "group"),
    "Dr. GRPO": (lambda *b: dr_grpo_loss(*b, 0.2, 6), "none"),
    "DAPO": (dapo_by_seed, "group"),
    "GSPO": (lambda *b: gspo_loss(*b, 4e-4), "group"),
    "GSPO（広い ε）": (lambda *b: gspo_loss(*b, 0.05), "group"),
}

# %%
traces = {name: fit(loss_of, scale, updates=4, generations=60, noise=0.0,
                    lr=0.05) for name, (loss_of, scale) in FOUR.items()}

# %%
length_6 = world_6.mask.sum(-1).double()
reward_of, wrong_length = {}, {}  # それぞれ (シード, 世代)
for name, probs in traces.items():
    reward_of[name] = expect(probs, right).mean(-1).T
    wrong_length[name] = (expect(probs, (1 - right) * length_6)
                          / expect(probs, 1 - right)).mean(-1).T

# %%
TRL_RUNS = {
    "GRPO": dict(level="token", epsilon=0.2),
    "Dr. GRPO": dict(level="token", epsilon=0.2, loss_type="dr_grpo",
                     scale_rewards="none"),
    "DAPO": dict(level="token", epsilon=0.2, loss_type="dapo",
                 epsilon_high=0.28),
}
trained = {name: train_group(**settings)
           for name, settings in TRL_RUNS.items()}
trained["GSPO"] = trainer, history
logs = {name: by_generation(log) for name, (_, log) in trained.items()}

# %%
tints_4 = dict(zip(FOUR, (COLOURS[0], COLOURS[3], COLOURS[2], COLOURS[1],
                          COLOURS[5]), strict=True))
drawn, axes = figure(2, 2, panel=(5.2, 3.2))
xlabel = "世代（4 回ずつ更新）"
for name in ("GRPO", "GSPO", "GSPO（広い ε）"):
    spread(range(61), reward_of[name], label=name, ax=axes[0, 0],
           colour=tints_4[name], xlabel=xlabel,
           title="世界：正解の確率（16 シード）")
for name in ("Dr. GRPO", "DAPO", "GSPO", "GSPO（広い ε）"):
    spread(range(61), reward_of[name] - reward_of["GRPO"], label=name,
           ax=axes[0, 1], colour=tints_4[name], xlabel=xlabel,
           title="世界：同じシードの GRPO との差")
for ax, column, title in (
    (axes[1, 0], "reward", "言語モデル：報酬（5 世代の移動平均）"),
    (axes[1, 1], "entropy", "言語モデル：エントロピー（nat、移動平均）"),
):
    for name, log in logs.items():
        ax.plot(log["step"], log[column].rolling(5, min_periods=1).mean(),
                color=tints_4[name], label=name)
    ax.set(title=title, xlabel=xlabel, xticks=range(0, 21, 5))
axes[1, 0].legend(loc="lower right")
drawn

# %%
final = {name: measure(trained[name][0].model, tokenizer, PRIME_SUMS,
                       prompts, samples=8) for name in TRL_RUNS}
final["GSPO"] = score_after
four_table = pd.DataFrame({name: {
    "世界: 15 世代目": reward_of[name][:, 15].quantile(0.5).item(),
    "世界: 60 世代目": reward_of[name][:, -1].quantile(0.5).item(),
    "世界: 間違いの長さ": wrong_length[name][:, -1].quantile(0.5).item(),
} for name in FOUR}).T
four_table["言語モデル: 正解率"] = pd.Series(
    {name: scores["sampled"] for name, scores in final.items()})
four_table["言語モデル: 切られた割合"] = pd.Series(
    {name: log["clip_ratio/region_mean"].mean()
     for name, log in logs.items()})
four_table.round(3).astype(object).fillna("–")

# %%
slow = reward_of["GSPO"][:, 15]
for name in ("GRPO", "Dr. GRPO", "DAPO", "GSPO（広い ε）"):
    ahead = reward_of[name][:, 15] - slow
    check(f"15 世代目: GSPO（4e-4）は {name} より遅い", (ahead > 0).all(),
          f"差の中央値 {ahead.quantile(0.5):.2f}（16 シードとも）")

# %%
ends = {name: lines[:, -1] for name, lines in reward_of.items()}
check("60 世代目には、どの手法も学び終えている",
      min(end.min() for end in ends.values()) > 0.9)

# %%
for name in ("Dr. GRPO", "DAPO", "GSPO（広い ε）"):
    gap = (wrong_length[name] - wrong_length["GRPO"])[:, -1]
    check(f"{name}: 間違いの長さの GRPO との差は、シードによって符号が違う",
          gap.min() < 0 < gap.max(),
          f"{gap.min():+.2f}〜{gap.max():+.2f} トークン")

# %%
fewer = {k: expect(fit(FOUR["GRPO"][0], updates=k, generations=15, noise=0.0,
                       lr=0.05)[-1], right).mean(-1).quantile(0.5).item()
         for k in (1, 2)}

# %%
four_clipped = four_table.loc["GSPO", "世界: 15 世代目"]
print(f"15 世代目: GRPO を 1 回 {fewer[1]:.2f}、2 回 {fewer[2]:.2f}、"
      f"GSPO（4e-4）を 4 回 {four_clipped:.2f}")
check("GSPO（4e-4）の 4 回の更新は、GRPO の 2 回の更新とほぼ同じ",
      abs(four_clipped - fewer[2]) < 0.05 < four_clipped - fewer[1])

# %%
close = four_table.loc[["GRPO", "Dr. GRPO", "DAPO"], "言語モデル: 正解率"]
check("言語モデルでも、GRPO、Dr. GRPO、DAPO は並ぶ",
      close.max() - close.min() < 0.06,
      f"{close.min():.3f}〜{close.max():.3f}")
behind = close.min() - four_table.loc["GSPO", "言語モデル: 正解率"]
check("GSPO（4e-4）は、この 1 回では少し遅れた", behind > 0.02,
      f"差 {behind:.3f}")

# %% [markdown]
# 左上の図では、Dr. GRPO と DAPO は GRPO に重なるので省き、右上の「差」の図に描きました。この比較から言えるのは、次のことだけです。
#
# - この 2 つの課題では、GRPO、Dr. GRPO、DAPO の学び方に、はっきりした違いはありません。課題がやさしく、回答も短いからだと考えられます。
# - GSPO（ $\epsilon=4\times10^{-4}$ ）だけが遅いのは、2 番目からの更新の多くを切るからだと考えられます（切られた割合は「学習」の表で見ました）。4 回更新しても、世界では、GRPO で 2 回更新したのと同じくらいしか進みません。 $\epsilon$ を広げると、ほかの手法に近づきます。
# - 言語モデルの結果は 1 シードずつで、数 % の差に意味はありません。
#
# 手法の違いがはっきり出るのは、それぞれの手法がねらった場面です。回答の長さが偏るとき（5.3.2 節）、まれな正解を伸ばしたいときや打ち切りが多いとき（5.3.3 節）、長い回答を何度も使うとき（この節のステップ 5〜7、実験 1〜3）です。どれを使うか迷ったら、まず自分の設定で、比の広がり、切られた割合、回答の長さを測ってみてください。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/5.3.4-gspo.ipynb](exercises/5.3.4-gspo.ipynb) で、 $\xi$ と損失を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **積で切る** 実験 3 の `gspo_loss` を、 $\xi$ の代わりに積 $\rho$ を切り詰めるものに替えてください。同じ $\epsilon=0.05$ で、崩れる割合と速さはどうなるでしょうか。長さ 1 の回答ではどうでしょうか。
# 3. **偏りの順番** ステップ 6 の報酬を、「a の割合」から、回答ごとに乱数で決めた値に替えてください。トークンの比と $\xi$ の偏りの大小は、どうなるでしょうか。積の分散はどうでしょうか。
# 4. **ちょうどよい ε** 「学習」の `train_group` で、 $\epsilon$ を 0.003、0.02、0.1 に変えてください。世代の中の 2〜4 番目の更新の `clip_ratio` と、最後の正解率は、どう変わるでしょうか。
# 5. **最適化法** 実験 3 の Adam を SGD（学習率は 2 × 行数）に替えると、系列とトークンの差は残るでしょうか。

# %% [markdown]
# ## 参考文献
#
# - Zheng, Liu, Li ほか. Group Sequence Policy Optimization. 2025. [arXiv:2507.18071](https://arxiv.org/abs/2507.18071) GSPO の論文です。系列の比、幾何平均、GRPO との勾配の比較は、この論文に沿っています。
# - Shao ほか. DeepSeekMath. 2024. [arXiv:2402.03300](https://arxiv.org/abs/2402.03300) GRPO。5.3.1 節で扱います。
# - Liu ほか. Understanding R1-Zero-Like Training: A Critical Perspective. 2025. [arXiv:2503.20783](https://arxiv.org/abs/2503.20783) Dr. GRPO。5.3.2 節で扱います。
# - Yu ほか. DAPO: An Open-Source LLM Reinforcement Learning System at Scale. 2025. [arXiv:2503.14476](https://arxiv.org/abs/2503.14476) DAPO。5.3.3 節で扱います。
# - Schulman ほか. Proximal Policy Optimization Algorithms. 2017. [arXiv:1707.06347](https://arxiv.org/abs/1707.06347) クリップした目的関数のもとの論文です。
# - TRL 1.12.0 `GRPOTrainer`（`trl/trainer/grpo_trainer.py`）。
