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
# # 5.3.3 DAPO：GRPO への四つの手当て
#
# 本書 5.3.3 節の式 (5.14)〜(5.20) を扱います。
#
# DAPO（Decoupled Clip and Dynamic sAmpling Policy Optimization）は、GRPO で長い推論を学ばせたときに見つかった問題に、一つずつ手当てをした方法です。損失をトークンで平均し、クリッピングの上側を広げ、差のつかないグループを引き直し、長すぎる回答に罰を与えます。
# このノートブックでは、それぞれが何を変え、何を変えないのかを小さな世界で計算し、TRL の `GRPOTrainer` と値・勾配が一致することを確かめ、TRL にはない動的サンプリングも足して、小さな言語モデルを学習させます。
# 最後に、論文の表（工夫を一つずつ足していく実験）を小さな世界でたどります。ここで見えた効果と見えなかった効果を、数のとおりに書きます。
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
# | $G$ （グループの大きさ。一つのプロンプトに引く回答の数） | `group_size` | – | `num_generations` |
# | $r_i$ （回答の報酬） | `rewards` | (B,) | `reward` （平均） |
# | $\widehat{A}_{i,t}$ （アドバンテージ。回答の中では同じ値） | `advantages` | (B,) | `advantages` |
# | $\lvert y_i\rvert$ （EOS を含む回答の長さ） | `mask.sum(-1)` | (B,) | `completions/mean_length` （平均） |
# | $\log\pi_\theta(y_{i,t}\mid x,y_{i,<t})$、 $\log\pi_{\theta_{\mathrm{old}}}(\cdot)$ | `logps`, `old_logps` | (B, T) | `per_token_logps`, `old_per_token_logps` |
# | $w_{i,t}(\theta)$ （重要度比、上の 2 つの差の指数） | `ratio` | (B, T) | – |
# | $\epsilon_{\mathrm{low}},\ \epsilon_{\mathrm{high}}$ （クリッピングの下側と上側の幅） | `epsilon_low`, `epsilon_high` | – | `epsilon`, `epsilon_high` |
# | 平均の分母（バッチ全体のトークン数） | `num_tokens` | – | `num_items_in_batch` |
# | $L_{\max},\ L_{\mathrm{cache}}$ （長さの上限と、罰が始まってから上限までの幅） | `max_length`, `cache` | – | `max_completion_len`, `soft_punish_cache` |
#
# B はバッチの回答の数（プロンプトの数 × $G$ ）、T はいちばん長い回答のトークン数です。B 行は、同じプロンプトの $G$ 行が続くように並べます。対数確率の単位は nat です。

# %% [markdown]
# ## 導出
#
# ### 出発点：GRPO
#
# GRPO（5.3.1 節）では、一つのプロンプト $x$ に、いまの方策 $\pi_{\theta_{\mathrm{old}}}$ で $G$ 個の回答 $y_1,\dots,y_G$ を引き、採点して報酬 $r_1,\dots,r_G$ を得ます。回答の良し悪しは、グループの平均との差で測ります。
#
# $$
# \widehat{A}_{i,t}=\frac{r_i-\mathrm{mean}(r_1,\dots,r_G)}{\mathrm{std}(r_1,\dots,r_G)}\tag{5.18}
# $$
#
# std は $G-1$ で割るほうで、TRL もこのパッケージも、0 で割らないように、分母に $10^{-4}$ を足します。一度引いた回答で何度か更新すると、方策 $\pi_\theta$ は、引いたときの方策から離れます。そこで、トークンごとの重要度比
# $w_{i,t}(\theta)=\pi_\theta(y_{i,t}\mid x,y_{i,<t})/\pi_{\theta_{\mathrm{old}}}(y_{i,t}\mid x,y_{i,<t})$ を掛け、行き過ぎをクリッピングで抑えます。DAPO の、一つのトークンの目的関数は
#
# $$
# \widehat{W}_{i,t}^{\mathrm{DAPO}}(\theta)=\min\Bigl\{w_{i,t}(\theta)\,\widehat{A}_{i,t},\ \mathrm{clip}\bigl(w_{i,t}(\theta),\,1-\epsilon_{\mathrm{low}},\,1+\epsilon_{\mathrm{high}}\bigr)\,\widehat{A}_{i,t}\Bigr\}\tag{5.19}
# $$
#
# です。GRPO との違いは、クリッピング (5.20) の上下の幅が別々なことです。KL の項はありません。
#
# 式を確かめる場所として、文字は a と b の 2 つ、回答は最長 3 トークンという、とても小さな言語を用意します。回答は EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。
# 方策は、プロンプトと接頭辞ごとに次のトークンのロジットを並べた表です（表形式の方策）。期待値はどれも有限の和になります。

# %%
from companion.exact import World, expect

world = World(prompts=2, letters=2, max_length=3)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# ### ステップ 1：トークンで平均するか、回答で平均するか
#
# GRPO は、まず回答の中でトークンについて平均し、それから $G$ 個の回答について平均します。DAPO は、グループの全部のトークンを一度に平均します。
#
# $$
# J_{\mathrm{GRPO}}:\ \frac1G\sum_{i=1}^{G}\frac{1}{|y_i|}\sum_{t=1}^{|y_i|}\widehat{W}_{i,t}
# \qquad\qquad
# J_{\mathrm{DAPO}}:\ \frac{1}{\sum_{i=1}^{G}|y_i|}\sum_{i=1}^{G}\sum_{t=1}^{|y_i|}\widehat{W}_{i,t}\tag{5.16}
# $$
#
# 1 トークンの回答と 3 トークンの回答があり、トークンの損失がそれぞれ 1 と 3 だとします（引いた直後は $w=1$ なので、損失は $-\widehat{A}$ です）。
# `grpo_loss` と `dapo_loss` は、目的関数の符号を変えた、パッケージの損失関数です（中身は「実装」で読みます）。

# %%
from companion.losses import dapo_loss, grpo_loss

logps = torch.zeros(2, 3, dtype=torch.float64)
mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
losses = torch.tensor([1.0, 3.0]).double()
claim("回答ごとの平均 = (1 + 3)/2",
      grpo_loss(logps, logps, -losses, mask, 0.2), 2.0)
claim("トークンの平均 = (1 + 3 + 3 + 3)/4",
      dapo_loss(logps, logps, -losses, mask, 0.2, 0.28), 2.5)

# %% [markdown]
# どのトークンが、どれだけの重みで効くのでしょうか。アドバンテージを 1 とした勾配で読みとれます。

# %%
def token_weights(loss_of):
    leaf = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    loss_of(leaf, torch.ones(2).double()).backward()
    return -leaf.grad

# %%
by_response = token_weights(
    lambda lp, A: grpo_loss(lp, logps, A, mask, 0.2))
by_token = token_weights(
    lambda lp, A: dapo_loss(lp, logps, A, mask, 0.2, 0.28))
claim("GRPO の重みは 1/(G|y_i|)", by_response,
      [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]])
claim("DAPO の重みは 1/Σ|y_j|", by_token,
      [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]])

# %% [markdown]
# GRPO では、長い回答のトークンほど軽くなります。論文は、長くて良い回答から推論のしかたを学びにくいことと、長い回答の中の、繰り返しや意味のない文字列が十分に罰されないことを問題にしました。DAPO では、どのトークンも同じ重みです。
# 言い換えると、DAPO は、GRPO の平均を **長さで重みづけた** ものです。
#
# $$
# \frac{1}{\sum_j|y_j|}\sum_{i,t}\widehat{W}_{i,t}=\sum_{i=1}^{G}\frac{|y_i|}{\sum_j|y_j|}\Bigl(\frac{1}{|y_i|}\sum_{t=1}^{|y_i|}\widehat{W}_{i,t}\Bigr)
# $$

# %%
g = torch.Generator().manual_seed(0)
lengths = torch.tensor([2, 8, 5, 1])
mask = torch.arange(8) < lengths[:, None]
logps, old_logps = -torch.rand(2, 4, 8, generator=g, dtype=torch.float64)
A = torch.tensor([1.0, -1.0, 0.5, -0.5]).double()

# %%
one_by_one = torch.stack([
    grpo_loss(*(t[[i]] for t in (logps, old_logps, A, mask)), 0.2)
    for i in range(4)
])
claim("DAPO = 長さで重みづけた回答ごとの平均",
      dapo_loss(logps, old_logps, A, mask, 0.2, 0.2),
      (lengths / lengths.sum() * one_by_one).sum())

# %% [markdown]
# 長さが違うと、値も変わります。 $\widehat{A}=(+1,-1)$、長さ 2 と 8 なら、GRPO の損失は打ち消し合って 0 ですが、DAPO では悪い回答の 8 トークンが勝って $(8-2)/10=0.6$ です。
# ですから、引いた直後に印字される DAPO の損失は、一般に 0 ではありません。報酬 $(1,0,0,0)$、長さ 4、1、2、3 なら、およそ $-0.3$ です。どちらも学習の良し悪しを表す数ではないので、損失ではなく報酬と勾配のノルムを見ましょう。

# %%
from companion.losses import group_advantages


def on_policy(loss, A, lengths, *settings):
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(len(A), 8).double()
    return loss(zeros, zeros, A, mask, *settings)

# %%
plus_minus = torch.tensor([1.0, -1.0]).double()
claim("GRPO は 0", on_policy(grpo_loss, plus_minus, [2, 8], 0.2), 0)
claim("DAPO は 0.6",
      on_policy(dapo_loss, plus_minus, [2, 8], 0.2, 0.28), 0.6)

# %%
A = group_advantages(torch.tensor([1.0, 0, 0, 0]).double(), group_size=4)
claim("報酬 (1, 0, 0, 0)、長さ 4, 1, 2, 3 なら −(4A₁ + 6A₂)/10",
      on_policy(dapo_loss, A, [4, 1, 2, 3], 0.2, 0.28),
      -(4 * 0.75 - 6 * 0.25) / 10 / (0.5 + 1e-4))

# %% [markdown]
# ### ステップ 2：トークンの平均は、比の推定量
#
# 式 (5.16) は、期待値の中に「和 ÷ 和」が入っています。分母の $\sum_i|y_i|$ も、引くたびに変わる確率変数です。
# 比の期待値は、期待値の比ではありません。話を簡単にするため、トークンの目的関数は、その回答だけで決まる数 $f(y)$ だとします（実際のアドバンテージは、グループのほかの回答にもよります）。 $G$ 個を独立に引くと、次のようになります。
#
# $$
# J_G=\mathbb{E}\biggl[\frac{\sum_{i=1}^{G}|y_i|\,f(y_i)}{\sum_{i=1}^{G}|y_i|}\biggr]\ \ne\ J_\infty=\frac{\mathbb{E}[|y|\,f(y)]}{\mathbb{E}[|y|]}
# $$
#
# **主張** $J_1$ は回答ごとの平均 $\mathbb{E}[f(y)]$ です。 $G$ が大きくなるにつれて $J_\infty$ に近づき、その差（偏り）は、ほぼ $G$ に反比例します（係数は、分子と分母を平均のまわりで展開して得られます）。
#
# $$
# G\,(J_G-J_\infty)\ \to\ -\frac{\mathrm{Cov}\bigl(|y|\,(f(y)-J_\infty),\ |y|\bigr)}{\mathbb{E}[|y|]^2}
# $$
#
# 文字が 1 つだけ、最長 3 トークンの世界（回答は 4 通り）で、4 通りの回答が何個ずつ出るかを、すべて数え上げます。

# %%
chain = World(prompts=1, letters=1, max_length=3)
g = torch.Generator().manual_seed(2)
probs = chain.log_probs(chain.random_logits(g))[0].exp()
f = chain.random_rewards(g)[0]
n = chain.mask.sum(-1).double()

# %%
def J(G):
    """多項分布についての、正確な期待値。"""
    counts = torch.cartesian_prod(*[torch.arange(G + 1.0).double()] * 4)
    counts = counts[counts.sum(-1) == G]  # 4 通りの回答の個数
    orders = torch.lgamma(torch.tensor(G + 1.0).double())
    orders = (orders - torch.lgamma(counts + 1).sum(-1)).exp()
    chance = orders * (probs**counts).prod(-1)
    return (chance * (counts @ (n * f)) / (counts @ n)).sum()


# %%
J_inf = (probs * n * f).sum() / (probs * n).sum()
claim("J₁ = E[f(y)]、回答ごとの平均", J(1), (probs * f).sum())

mean_n = (probs * n).sum()
deviation = n * (f - J_inf)  # 期待値は 0
limit = -(probs * deviation * (n - mean_n)).sum() / mean_n**2
bias = {G: (J(G) - J_inf).item() for G in (1, 2, 4, 8, 16, 32)}
print({G: f"{b:+.4f}" for G, b in bias.items()})

# %%
falls = [bias[2 * G] / bias[G] for G in (1, 2, 4, 8, 16)]
check("G を 2 倍にするたびに、偏りはほぼ半分になる",
      0.4 < min(falls) and max(falls) < 0.6,
      "、".join(f"{x:.2f}" for x in falls))
check("G = 32 で、G × 偏りは極限の値に近い",
      abs(32 * bias[32] / limit - 1) < 0.05,
      f"{32 * bias[32]:.4f}、極限 {limit:.4f}")

# %% [markdown]
# つまり、トークンの平均が目ざすのは「長さで重みをつけた平均」ですが、 $G$ が小さいうちは偏りがあります（この世界では、回答ごとの平均 $J_1$ のほうへ寄っています）。TRL のように、いくつものプロンプトのトークンをまとめて平均すれば、分母の揺れは、割合としては小さくなります。

# %% [markdown]
# ### ステップ 3：どこまでを一つの平均にするか
#
# 式 (5.16) は、一つのプロンプトの式です。プロンプトが 2 つ以上あるとき、期待値の記号のとおりなら、プロンプトごとに平均してから、プロンプトについて平均します。TRL は、バッチの **全部のプロンプトのトークン** を一度に平均します。
# 2 つのプロンプトのトークンの損失が、一方は 1 が 4 個、他方は 0 が 12 個なら、前者は $(1+0)/2$、後者は $4/16$ です。

# %%
losses = torch.tensor([1.0, 0.0]).double()
claim("プロンプトごとに平均してから平均", torch.stack([
    on_policy(dapo_loss, -losses[[k]], [4], 0.2, 0.28) for k in (0, 1)
]).mean(), 0.5)

# %%
zeros = torch.zeros(2, 12).double()
mask = torch.arange(12) < torch.tensor([4, 12])[:, None]
claim("全部のトークンの平均",
      dapo_loss(zeros, zeros, -losses, mask, 0.2, 0.28), 0.25)

# %% [markdown]
# どちらが正しいというものではなく、選び方です。以下、「トークンの平均」は、断りがなければバッチ全体のものです。
#
# バッチを切り分けて計算するとき（勾配蓄積や、複数の GPU）には、気をつけることがあります。部分ごとに平均してから平均すると、切り方によって値が変わるのです。
# バッチ **全体** のトークン数で割った部分を **足せば**、切り方によりません。 `dapo_loss` の `num_tokens` は、そのためのものです。

# %%
rows, T = 8, 6
g = torch.Generator().manual_seed(1)
logps, old_logps = -torch.rand(2, rows, T, generator=g, dtype=torch.float64)
A = torch.randn(rows, generator=g, dtype=torch.float64)
mask = torch.arange(T) < torch.randint(1, T + 1, (rows, 1), generator=g)
batch = logps, old_logps, A, mask

# %%
whole = dapo_loss(*batch, 0.2, 0.28)
for sizes in ([4, 4], [2, 2, 2, 2], [1] * 8, [3, 5]):
    parts = zip(*(tensor.split(sizes) for tensor in batch), strict=True)
    claim(f"{sizes} に切って足す", sum(
        dapo_loss(*part, 0.2, 0.28, num_tokens=mask.sum())
        for part in parts), whole)

# %% [markdown]
# 先ほどの「損失が $[1]$ と $[3,3,3]$」の例で、まちがった切り方も並べておきます。

# %%
parts = [(-torch.tensor([1.0]).double(), [1]),
         (-torch.tensor([3.0]).double(), [3])]
shares = [on_policy(dapo_loss, *part, 0.2, 0.28, 4) for part in parts]
means = [on_policy(dapo_loss, *part, 0.2, 0.28) for part in parts]
claim("正しい: 全体の 4 トークンで割って、足す", sum(shares), 2.5)
claim("部分の平均の平均", sum(means) / 2, 2.0)
claim("4 トークンで割って、さらに部分の数でも割る", sum(shares) / 2, 1.25)

# %% [markdown]
# ### ステップ 4：クリッピングの上側を広げる（clip-higher）
#
# アドバンテージが正のトークンは、比が $1+\epsilon_{\mathrm{high}}$ を超えると、目的関数が増えなくなり、勾配が 0 になります。 $\epsilon=0.2$ なら、引いたときの確率が 0.01 のトークンは、0.012 を超えたところで、自分の項からは、それ以上押し上げられなくなります。0.9 のトークンなら、 $0.9\times1.2=1.08$ で、確率の上限 1 のほうが先に来ます。
# 論文は、この非対称が、めったに出ない（探索の）トークンを不利にし、方策のエントロピーを失わせると考えて、上側だけを $\epsilon_{\mathrm{high}}=0.28$ に広げました。

# %%
one = torch.ones(1, 1)


def objective_and_slope(pi_old, pi, sign, high):
    """一つのトークンの目的関数と、log w についての傾き（ε_low = 0.2）。"""
    both = torch.tensor([pi, pi_old], dtype=torch.float64)
    logp, old = both.log().view(2, 1, 1)
    logp.requires_grad_()
    A = torch.tensor([sign]).double()
    loss = dapo_loss(logp, old, A, one, 0.2, high)
    (gradient,) = torch.autograd.grad(loss, logp)
    return -loss.item(), -gradient.item()


# %% [markdown]
# **主張** 引いたときの確率が $\pi_{\mathrm{old}}>1/(1+\epsilon_{\mathrm{high}})$ （ $\epsilon_{\mathrm{high}}=0.2$ なら 0.833、0.28 なら 0.781）のトークンには、上側のクリッピングが働くことはありません。比は $1/\pi_{\mathrm{old}}$ より大きくならないからです。確率を 0.9999 まで上げても、勾配が残ります。

# %%
for high, tops in ((0.2, {0.01: 0.012, 0.7: 0.84, 0.8: 0.96}),
                   (0.28, {0.01: 0.0128, 0.7: 0.896})):
    for pi_old, top in tops.items():
        gain, slope = objective_and_slope(pi_old, 0.9999, 1.0, high)
        claim(f"ε_high = {high}: {pi_old} は {top} で頭打ち、勾配 0",
              [gain * pi_old, slope], [top, 0])

# %%
for pi_old, high in ((0.9, 0.2), (0.8, 0.28), (0.9, 0.28)):
    slope = objective_and_slope(pi_old, 0.9999, 1.0, high)[1]
    claim(f"ε_high = {high}: {pi_old} なら勾配が残る",
          slope, 0.9999 / pi_old)

# %% [markdown]
# 一つのトークンの目的関数と、その対数比 $\log w$ についての傾きです。左から、比 $w$、アドバンテージ、 $\epsilon_{\mathrm{high}}$ です（ $\epsilon_{\mathrm{low}}=0.2$ ）。

# %%
cases = {  # (w, A, ε_high): (目的関数, 傾き)
    (1.5, +1, 0.2): (1.2, 0), (1.5, -1, 0.2): (-1.5, -1.5),
    (0.5, +1, 0.2): (0.5, 0.5), (0.5, -1, 0.2): (-0.8, 0),
    (1.25, +1, 0.2): (1.2, 0), (1.25, +1, 0.28): (1.25, 1.25),
}
for (w, sign, high), expected in cases.items():
    claim(f"w = {w}、A = {sign:+}、ε_high = {high}",
          objective_and_slope(0.5, 0.5 * w, float(sign), high), expected)

# %% [markdown]
# 最後の 2 つが clip-higher の働きです。 $w=1.25$ のトークンに、勾配が残ります。
#
# **クリッピングは、方策が離れるのを防ぐ壁ではありません。** 止まるのは「そのトークン自身の項の勾配」だけです。同じ回答で更新を繰り返して、正解の比を追いましょう。
# 回答は 3 通り、引いたときの確率は 0.05、0.6、0.35 で、8 個のうち 1 個が正解（1 番目の回答）でした。

# %%
start = torch.tensor([0.05, 0.6, 0.35]).double().log()
answers = torch.tensor([0, 1, 1, 1, 1, 1, 2, 2])
A = group_advantages((answers == 0).double(), group_size=8)

# %%
def ratio_of_right(optimizer, lr, A, high=0.2, updates=40):
    """同じ 8 個の回答で更新を繰り返したときの、正解の重要度比。"""
    theta = start.clone().requires_grad_()
    optimizer = optimizer([theta], lr=lr)
    ratios = []
    for _ in range(updates + 1):
        logps = theta.log_softmax(-1)
        ratios.append((logps - start)[0].exp().item())
        optimizer.zero_grad()
        dapo_loss(logps[answers, None], start[answers, None], A,
                  torch.ones(8, 1), 0.2, high).backward()
        optimizer.step()
    return ratios


# %%
from torch.optim import SGD, Adam

only_right = torch.where(answers == 0, A, 0.0)
ways = {"Adam、8 個すべて": (Adam, 0.03, A),
        "Adam、正解の項だけ": (Adam, 0.03, only_right),
        "SGD、8 個すべて": (SGD, 0.05, A),
        "SGD、正解の項だけ": (SGD, 0.05, only_right)}
ratios = {name: ratio_of_right(*way) for name, way in ways.items()}

# %%
from companion.plots import COLOURS, GREY, figure

drawn, ((ax,),) = figure(1, 1, panel=(5.8, 3.3))
for colour, (name, line) in zip(COLOURS, ratios.items(), strict=False):
    ax.plot(line, color=colour, label=name)
ax.axhline(1.2, color=GREY, linestyle=":")
ax.annotate("1 + ε = 1.2", (41, 1.2), color=GREY, va="center",
            annotation_clip=False)
ax.set(title="同じ回答で更新を繰り返すと、比は 1.2 を超える",
       xlabel="更新回数", ylabel="正解の重要度比", xlim=(0, 40),
       ylim=(0.95, 2.8))
ax.legend(loc="upper left")
drawn

# %%
adam, adam_alone, everyone, alone = ratios.values()
check("SGD、正解の項だけなら、1.2 を少し超えたところで止まる",
      1.2 < alone[-1] < 1.23 and alone[-1] == alone[-10],
      f"{alone[-1]:.3f}")
check("誤答の項（A < 0）が残っていると、正解の確率は増えつづける",
      everyone[-1] > everyone[20] + 0.02 > 1.25,
      f"20 回で {everyone[20]:.3f}、40 回で {everyone[-1]:.3f}")
check("Adam では、正解の項だけでも、はるかに先まで行く",
      adam[-1] - 0.2 > adam_alone[-1] > 1.6,
      f"{adam_alone[-1]:.2f}、8 個すべてなら {adam[-1]:.2f}")

# %% [markdown]
# 正解の項だけを SGD で動かせば、比は 1.2 を超えた最初の更新で止まります（行き過ぎの大きさは、学習率しだいです）。誤答を下げる項が残っていれば、確率の和は 1 なので、正解は上がりつづけます。Adam では、正解の項だけでも、つまり勾配が 0 になったあとも、慣性で進みます。誤答の項が残っていれば、さらに先まで行きます。
# 上側の幅を 0.2 から 0.28 に変えたときに学習が変わるかどうかは、こうした事情しだいです。実験 2 で、変わる設定と変わらない設定を探します。

# %% [markdown]
# ### ステップ 5：差のないグループは、何も教えない
#
# $G$ 個の報酬がすべて等しいと、アドバンテージはすべて 0 で、勾配も 0 です。全部正解のグループも、全部不正解のグループも、です。こうしたグループを除くのが、式 (5.14) と (5.17) の動的サンプリングです。

# %%
from companion.losses import degenerate_groups

rewards = torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 0, 0.1, 0.1, 0.1, 0.1])
A = group_advantages(rewards, group_size=4)
print("差がない:", degenerate_groups(rewards, group_size=4).tolist())
claim("差がなければ、アドバンテージはちょうど 0",
      A[[0, 1, 2, 3, 8, 9, 10, 11]], torch.zeros(8), tol=0)

# %% [markdown]
# **主張** $G$ 個が独立に引かれるなら、グループに差がつかない確率は、報酬の値 $v$ が出る確率 $P(v)$ の $G$ 乗の和です。正解か不正解かの 2 値なら、正解率を $p$ として
#
# $$
# \sum_vP(v)^G=p^G+(1-p)^G
# $$
#
# $G=3$ の組を全部（ $15^3$ 組）数え上げ、パッケージの判定に掛けます。報酬は、3 通りの値をとるものと、2 値のものとを試します。

# %%
g = torch.Generator().manual_seed(0)
logits = world.random_logits(g)
logps = world.log_probs(logits)
index = torch.cartesian_prod(*[torch.arange(15)] * 3)  # (3375, 3)
chance = logps.exp()[:, index].prod(-1)  # (X, 3375)
three_values = torch.arange(15).remainder(3).double()
correct = (three_values == 0).double()

# %%
for name, r in (("3 値", three_values), ("2 値", correct)):
    same = degenerate_groups(r[index].flatten(), group_size=3)
    P = torch.stack([expect(logps.exp(), (r == v).double())
                     for v in r.unique()])
    claim(f"{name}: 差がつかない確率 = Σ_v P(v)^G",
          (chance * same).sum(-1), (P**3).sum(0))

# %% [markdown]
# 2 値の場合を、 $G$ を変えて描きます。

# %%
p = torch.linspace(0, 1, 201).double()
drawn, ((ax,),) = figure(1, 1, panel=(5.6, 3.1))
for colour, G in zip(COLOURS, (2, 4, 8, 16), strict=False):
    ax.plot(p, p**G + (1 - p)**G, color=colour, label=f"G = {G}")
ax.set(title="グループに差がつかない確率", xlabel="正解率 p",
       ylim=(0, 1), xlim=(0, 1))
ax.legend(loc="upper center")
drawn

# %% [markdown]
# 学習が進んで $p$ が 1 に近づくと、教えるグループは減っていきます。 $G=8$ でも、 $p=0.95$ なら 66% のグループに差がつきません。
#
# 正解率がプロンプトごとに違うときは、平均の正解率を式に入れてはいけません。 $p^G+(1-p)^G$ は下に凸なので、実際の割合は、平均から計算した値より大きくなります。

# %%
claim("G = 8、p = 0.95", 0.95**8 + 0.05**8, 0.663, tol=5e-4)
mixed = torch.tensor([0.05, 0.5, 0.95]).double()
by_mean = mixed.mean()**8 + (1 - mixed.mean())**8
check("正解率がばらつくと、割合は大きい",
      (mixed**8 + (1 - mixed)**8).mean() > by_mean + 0.3,
      f"{(mixed**8 + (1 - mixed)**8).mean():.3f}、平均からは {by_mean:.3f}")

# %% [markdown]
# ### ステップ 6：動的サンプリングは、勾配の期待値をどう変えるか
#
# **動的サンプリング** は、差のつかないグループを捨て、差のつくグループでバッチがいっぱいになるまで引き直します。勾配の期待値は、どう変わるでしょうか。
#
# **主張** 一つのプロンプトについて、損失を一定の数（引いたグループによらない数）で割るとき、差のついたグループだけの勾配 $g$ の期待値は、もとの期待値を「差のつく確率」で割ったものです。
#
# $$
# \mathbb{E}[\,g\mid\text{差がつく}\,]=\frac{\mathbb{E}[g]}{1-p^G-(1-p)^G}
# $$
#
# 捨てるグループの勾配は、どうせ 0 だからです。 $G=3$ のすべての組で、 $\pi_\theta=\pi_{\theta_{\mathrm{old}}}$ での勾配を計算します。min も clip も正の数倍をそのまま通すので、アドバンテージに組の確率を掛けておけば、損失の和がそのまま期待値になります。

# %%
same = degenerate_groups(correct[index].flatten(), group_size=3)
A = group_advantages(correct[index].flatten(), group_size=3)
mask = world.mask[index.flatten()]

# %%
def expected_gradient(weights):
    """組の重み (X, 組) での、損失の期待値の勾配。一定の数 1 で割る。"""
    theta = logits.clone().requires_grad_()
    loss = 0.0
    for x, weight in enumerate(weights):
        rows = world.token_log_probs(theta)[x, index.flatten()]
        loss = loss + dapo_loss(rows, rows.detach(),
                                A * weight.repeat_interleave(3), mask,
                                0.2, 0.28, num_tokens=1)
    return torch.autograd.grad(loss, theta)[0]


# %%
p = expect(logps.exp(), correct)
kept_share = 1 - p**3 - (1 - p)**3
kept = chance * ~same / kept_share[:, None]  # 差がついた、という条件つき
full = expected_gradient(chance)
claim("E[g｜差がつく] = E[g]/(1 − p^G − (1 − p)^G)",
      expected_gradient(kept), full / kept_share[:, None, None])

# %% [markdown]
# プロンプトごとに倍率が違うので、 **向き** が変わりそうに見えます。けれども、引き直すときには **別のプロンプト** を引くのでした。難しすぎる（易しすぎる）プロンプトは、引き直しで外されやすく、バッチに残る割合が減ります。
#
# **主張** プロンプトを毎回独立に引き、差がつくまで引き直すなら、バッチの一つの枠の勾配の期待値は、もとの期待値の定数倍です。向きは変わりません。
#
# $$
# \mathbb{E}[\,g_{\text{引き直し}}\,]=\frac{\mathbb{E}_x\mathbb{E}[g]}{1-\mathbb{E}_x[\,p_x^G+(1-p_x)^G\,]}
# $$

# %%
slot = chance / 2 * ~same  # プロンプトは半々の確率で引く
slot = slot / slot.sum()  # 差がついた (プロンプト, 組) の分布
in_batch = slot.sum(-1)
print("バッチの中の割合:", in_batch.numpy().round(3),
      " 正解率:", p.numpy().round(3))
claim("引き直した勾配 = もとの勾配 / (差がつく割合)",
      expected_gradient(slot), full / 2 / kept_share.mean())
check("残るプロンプトの割合は、半々ではない",
      (in_batch - 0.5).abs().max() > 0.02)

# %% [markdown]
# つまり、この条件のもとでは、動的サンプリングは「どちらへ動くか」を平均としては変えません。変えるのは、1 回の更新に入る、教えるグループの数です（そのかわり、 $1/(1-\text{差のつかない割合})$ 倍の回答を生成します）。パッケージのトレーナーは、一つのバッチの中で同じ問題をなるべく重ねて引かないので、「独立に」という条件からは少し外れます。
# TRL のように、バッチのトークン数で割るときは、もう一つ違いが出ます。差のつかないグループのトークンは、分子には 0 を、 **分母には長さを** 足すからです。次の式は、同じバッチで、捨てるだけで引き直さないときの比較です。
#
# $$
# \mathcal{L}(\text{捨てない})=\frac{N_{\text{差がつく}}}{N_{\text{全部}}}\,\mathcal{L}(\text{捨てる})\qquad(N\text{ はトークンの数})
# $$

# %%
r = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0]).double()
A12 = group_advantages(r, group_size=4)
g = torch.Generator().manual_seed(3)
lp, old = -torch.rand(2, 12, 6, generator=g, dtype=torch.float64)
m12 = torch.arange(6) < torch.randint(1, 7, (12, 1), generator=g)

# %%
good = ~degenerate_groups(r, 4).repeat_interleave(4)
claim("差のないグループは、分母だけを増やす",
      dapo_loss(lp, old, A12, m12, 0.2, 0.28),
      m12[good].sum().double() / m12.sum()
      * dapo_loss(lp[good], old[good], A12[good], m12[good], 0.2, 0.28))

# %% [markdown]
# 学習が進んで差のつかないグループが増えると、DAPO の損失も勾配も、その分だけ薄まります。動的サンプリングには、これを防ぐ働きもあります。

# %% [markdown]
# ### ステップ 7：長さに応じた報酬
#
# 長さの上限 $L_{\max}$ で打ち切られた回答を、ただ「不正解」とするのではなく、上限の手前から少しずつ罰を与えるのが、式 (5.15) です。正解の報酬に足して使います。
#
# $$
# r_{\mathrm{length}}(y)=\begin{cases}0&|y|\le L_{\max}-L_{\mathrm{cache}}\\[2pt]\dfrac{(L_{\max}-L_{\mathrm{cache}})-|y|}{L_{\mathrm{cache}}}&L_{\max}-L_{\mathrm{cache}}<|y|\le L_{\max}\\[4pt]-1&L_{\max}<|y|\end{cases}\tag{5.15}
# $$

# %%
from companion.losses import overlong_penalty

n = torch.arange(60, 111)
drawn, ((ax,),) = figure(1, 1, panel=(5.6, 2.6))
ax.plot(n, overlong_penalty(n, max_length=100, cache=20), color=COLOURS[0])
for place, name, side in ((79, "L_max − L_cache", "right"),
                          (101, "L_max", "left")):
    ax.axvline(round(place, -1), color=GREY, linestyle=":")
    ax.annotate(name, (place, -0.2), color=GREY, ha=side)
ax.set(title="長さに応じた報酬（L_max = 100、L_cache = 20）",
       xlabel="回答の長さ（トークン）", xlim=(60, 110))
drawn

# %%
points = torch.tensor([80, 81, 90, 100, 101])
claim("80、81、90、100、101 トークン",
      overlong_penalty(points, max_length=100, cache=20),
      [0, -1 / 20, -10 / 20, -1, -1], tol=1e-6)

# %% [markdown]
# この罰には、見落としやすい働きがあります。全員が正解のグループでも、長さが違えば **報酬に差がつく** のです。しかも、std で割るので、罰が小さくても（分母に足す $10^{-4}$ よりずっと大きいかぎり）、アドバンテージの大きさは正解・不正解の差と同じくらいになります。

# %%
all_right = torch.ones(4).double()
A_of = {}
for worst in (-1.0, -0.05):
    penalty = torch.tensor([0, 0, 0, worst]).double()
    A_of[worst] = group_advantages(all_right + penalty, group_size=4)
    print(f"罰 {worst}:", A_of[worst].numpy().round(3))

# %%
check("罰が 20 分の 1 でも、アドバンテージはほとんど同じ",
      (A_of[-1.0] - A_of[-0.05]).abs().max() < 0.01)
check("正解だけで判定すれば差がない、罰を足すと差がある",
      degenerate_groups(all_right, 4).item()
      and not degenerate_groups(all_right + penalty, 4).item())

# %% [markdown]
# 全員が不正解のグループでも同じで、「短い不正解」がほめられます。ですから、動的サンプリングの判定は、罰を足す **前** の、正解の報酬だけで行います（論文の条件も「正解の数が 0 より多く $G$ より少ない」です）。実験 1 で、これが大きな違いになるのを見ます。

# %% [markdown]
# ## 実装
#
# 式 (5.16)〜(5.20) と (5.15) を、そのまま NumPy で書きます。引数は、回答ごとの「トークンの対数確率の列」です。回答の長さはまちまちなので、リストに入れて渡します。

# %%
import numpy as np


def dapo_loss_numpy(logps, old_logps, advantages, eps_low, eps_high):
    total, tokens = 0.0, 0
    for i in range(len(logps)):
        for t in range(len(logps[i])):
            w = np.exp(logps[i][t] - old_logps[i][t])
            clipped = min(max(w, 1 - eps_low), 1 + eps_high)
            total += min(w * advantages[i], clipped * advantages[i])
            tokens += 1
    return -total / tokens


# %%
def overlong_penalty_numpy(length, max_length, cache):
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return (max_length - cache - length) / cache
    return -1.0


# %% [markdown]
# パッケージの関数は、同じ式をベクトルで書いた PyTorch 版です（説明の文は省いて表示します）。入力の検査のあと、最後の数行が式です。

# %%
import inspect
import re

from companion.losses.surrogate import clipped_surrogate

for function in (dapo_loss, overlong_penalty, clipped_surrogate):
    code = inspect.getsource(function)
    print(re.sub(r'    """.*?"""\n', "", code, flags=re.DOTALL))

# %% [markdown]
# `clipped_surrogate` は、クリッピングを使う損失に共通の部品です。入力の検査には、比があふれる場合（アドバンテージが負だと、クリッピングでは抑えられません）の扱いも含まれます。
#
# 長さの違う 8 つの回答で、2 つの実装を比べます。

# %%
logps, old_logps, A, mask = batch  # ステップ 3 の、8 つの回答


def rows_of(tensor):
    return [row[m].numpy() for row, m in zip(tensor, mask, strict=True)]

# %%
for eps in ((0.2, 0.28), (0.1, 0.4)):
    claim(f"ε_low, ε_high = {eps}: NumPy = PyTorch",
          dapo_loss_numpy(rows_of(logps), rows_of(old_logps), A.numpy(),
                          *eps), dapo_loss(*batch, *eps), tol=1e-12)

# %%
n = torch.arange(1, 41).double()
claim("長さの罰: NumPy = PyTorch", overlong_penalty(n, 32, 9),
      [overlong_penalty_numpy(k, 32, 9) for k in range(1, 41)], tol=1e-12)

# %% [markdown]
# 勾配は、数値微分と比べます（ `gradcheck` ）。引いたときの対数確率にもアドバンテージにも、勾配は流れません。

# %%
leaf, old_leaf, A_leaf = (t.clone().requires_grad_()
                          for t in (logps, old_logps, A))
matches = torch.autograd.gradcheck(
    lambda lp: dapo_loss(lp, old_leaf, A_leaf, mask, 0.2, 0.28), leaf)
check("自動微分の勾配 = 数値微分の勾配", matches)

# %%
dapo_loss(leaf, old_leaf, A_leaf, mask, 0.2, 0.28).backward()
check("データに勾配は流れない",
      old_leaf.grad is None and A_leaf.grad is None)
claim("パディングの位置の勾配は 0", leaf.grad[~mask], 0.0)

# %% [markdown]
# 「実験」で使う恒等式を、もう一つ。アドバンテージの正の数倍は、そのまま損失の外に出ます。だから、回答ごとの平均（GRPO）も、アドバンテージを長さで割れば `dapo_loss` で書けます。上側だけを広げた GRPO も、これで作れます。

# %%
claim("GRPO = アドバンテージを |y_i| で割った DAPO",
      grpo_loss(*batch, 0.2),
      dapo_loss(logps, old_logps, A / mask.sum(-1), mask, 0.2, 0.2,
                num_tokens=len(A)))

# %% [markdown]
# 端の場合も見ておきましょう。空の回答は、トークンの平均では数に入りません。全部がマスクされていれば、損失は 0 です。比が大きすぎる場合は、アドバンテージが正ならクリッピングで抑えられ、負なら抑えるものがないのでエラーになります。

# %%
claim("長さ 2 と 0、A = (+1, −1): DAPO は −1、GRPO は −1/2",
      [on_policy(dapo_loss, plus_minus, [2, 0], 0.2, 0.28).item(),
       on_policy(grpo_loss, plus_minus, [2, 0], 0.2).item()], [-1, -0.5])
claim("全部マスク",
      on_policy(dapo_loss, plus_minus, [0, 0], 0.2, 0.28), 0)

# %%
huge, none = torch.full((1, 1), 89.0), torch.zeros(1, 1)  # float32
one_leaf = huge.clone().requires_grad_()
loss = dapo_loss(one_leaf, none, torch.ones(1), one, 0.2, 0.28)
loss.backward()
claim("対数比 89、A = +1: −1.28 で止まり、勾配は 0",
      [loss.item(), one_leaf.grad.item()], [-1.28, 0], tol=1e-6)


# %%
def message_of(build):
    try:
        build()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "エラーになりません"

# %%
bad = logps.clone()
bad[1, 0] = -torch.inf
for name, words, build in (
    ("対数比 89、A = −1", "unclipped", lambda: dapo_loss(
        huge, none, -torch.ones(1), one, 0.2, 0.28)),
    ("対数確率が −∞", "logps[1, 0]", lambda: dapo_loss(
        bad, old_logps, A, mask, 0.2, 0.28)),
    ("G = 1", "G ≥ 2", lambda: group_advantages(all_right, group_size=1)),
    ("罰の幅が上限より広い", "cache is 9", lambda: overlong_penalty(
        points, max_length=8, cache=9)),
):
    message = message_of(build)
    check(f"{name}はエラー", words in message, message[:60])

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じ回答で、損失と勾配を比べる
#
# 相手は TRL の `GRPOTrainer` そのものです。SFT 済みの小さなモデル（float64）を方策 $\pi_\theta$ とし、その重みを少し動かしたものを、回答を引いたときの方策 $\pi_{\theta_{\mathrm{old}}}$ とします（比を 1 からずらさないと、クリッピングの間違いは見つかりません）。
# プロンプトは 3 つ、 $G=4$ で、正解・不正解の並びと回答の長さを変えてあります。最後の回答は、EOS がない、打ち切られた回答です。

# %%
import copy

from companion.lm import load

model, tokenizer = load("prime-sums", dtype=torch.float64)

# %%
old_model = copy.deepcopy(model)
noise = torch.Generator().manual_seed(1)
with torch.no_grad():
    for p in old_model.parameters():
        p += 0.1 * p.std() * torch.randn(p.shape, generator=noise,
                                         dtype=p.dtype)

# %%
texts = ["77", "78", "75", "9", "328", "328", "1", "32",
         "1060", "106", "1060", "1160012"]
rewards = [1.0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0]
prompt_ids = tokenizer([f"{n}未満の素数の合計は？"
                        for n in (20, 50, 99) for _ in range(4)])["input_ids"]
completion_ids = [ids + [tokenizer.eos_token_id]
                  for ids in tokenizer(texts)["input_ids"]]
del completion_ids[-1][-1]  # 打ち切られた回答

# %% [markdown]
# `trl_grpo` は、こちらが決めた回答と報酬を TRL のトレーナーに渡し、TRL 自身の損失と勾配を取り出します。 `num_iterations=2` は「一度の生成を 2 回使う」設定で、こうすると TRL は $\pi_{\theta_{\mathrm{old}}}$ の対数確率を別に計算します。
# プロンプトの長さをそろえてあるのは、TRL が左のパディングも位置に数え、位置の計算（RoPE）が float32 で行われるためです。長さが違うと、それだけで 1e-7 ほどずれます。

# %%
from companion.lm import token_log_probs
from companion.oracle import trl_grpo

page = dict(loss_type="dapo", importance_sampling_level="token",
            scale_rewards="group", beta=0.0, epsilon=0.2,
            epsilon_high=0.28)

# %%
def ask_trl(rewards=rewards, updates=2, **changes):
    return trl_grpo(
        model, old_model, model, prompt_ids, completion_ids, rewards,
        tokenizer, num_generations=4, num_iterations=updates,
        **(page | changes),
    )

# %%
theirs = ask_trl()
clipped = {side: theirs.metrics[f"clip_ratio/{side}_mean"]
           for side in ("low", "high")}
check("クリッピングは、上側でも下側でも働いている",
      min(clipped.values()) > 0,
      "下側 {low:.3f}、上側 {high:.3f}".format(**clipped))

# %%
A_trl = group_advantages(rewards, group_size=4)
claim("アドバンテージ（TRL は float32）", A_trl, theirs.advantages, tol=1e-6)

# %%
A = theirs.advantages.double()
mask = theirs.batch["completion_mask"]
logps = token_log_probs(model, **theirs.batch)
old_logps = token_log_probs(old_model, **theirs.batch).detach()
print("回答の長さ:", mask.sum(-1).tolist())


# %%
def ours_of(high):
    loss = dapo_loss(logps, old_logps, A, mask, 0.2, high)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    return loss.item(), dict(zip(names, gradients, strict=True))

# %%
def numpy_of(high):
    kept = [[row[m == 1].numpy() for row, m in zip(t, mask, strict=True)]
            for t in (logps.detach(), old_logps)]
    return dapo_loss_numpy(*kept, A.numpy(), 0.2, high)


# %%
import pandas as pd

table = {}
for high in (0.2, 0.28, 0.6):
    theirs_at = ask_trl(epsilon_high=high)
    loss, gradients = ours_of(high)
    gap = max((gradients[n] - theirs_at.gradients[n]).abs().max().item()
              for n in gradients)
    check(f"ε_high = {high}: 全パラメータの勾配が一致", gap <= 1e-12,
          f"最大差 {gap:.0e}")
    table[f"ε_high = {high}"] = numpy_of(high), loss, theirs_at.loss.item()

# %%
parity = pd.DataFrame(table, index=["NumPy", "torch", "TRL"]).T
gaps = parity.max(axis=1) - parity.min(axis=1)
check("NumPy = torch = TRL", gaps.max() <= 1e-12, f"最大差 {gaps.max():.0e}")
parity = parity.map("{:.12f}".format)
parity["最大差"] = gaps.map("{:.0e}".format)
parity

# %% [markdown]
# ### 切り方を変えても、TRL の損失は同じか
#
# TRL に、同じ 8 つの回答（2 プロンプト × $G=4$ ）を、一度に 8 行、4 行ずつ 2 回、2 行ずつ 4 回の勾配蓄積で渡します。学習率は 0 にして、乱数の種をそろえます。
# `bnpo` は、TRL にある別の損失で、 **部分ごとに** トークンで平均してから、部分について平均します。ステップ 3 の「部分の平均の平均」です。

# %%
import tempfile

from trl import GRPOConfig, GRPOTrainer

from companion.lm import checkpoint
from companion.rewards import exact_match
from companion.tasks import PRIME_SUMS, problems
from companion.training import train

# %%
on_cpu = dict(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False,
              gradient_checkpointing=False, report_to="none",
              save_strategy="no", disable_tqdm=True, logging_steps=1)
eight_rows = problems(PRIME_SUMS, 16, seed=3)

# %%
def logged(size, parts, steps=1, **config):
    trainer = GRPOTrainer(
        str(checkpoint("prime-sums")), exact_match,
        args=GRPOConfig(
            **(page | on_cpu | config), max_steps=steps, num_generations=4,
            per_device_train_batch_size=size, learning_rate=0.0,
            gradient_accumulation_steps=parts, max_completion_length=8),
        processing_class=tokenizer, train_dataset=eight_rows)
    return train(trainer)


# %%
splits = {}
for loss_type in ("dapo", "bnpo"):
    for size, parts in ((8, 1), (4, 2), (2, 4)):
        row = logged(size, parts, loss_type=loss_type).iloc[0]
        splits[loss_type, f"{size} 行 × {parts}"] = row[["loss", "grad_norm"]]
pd.DataFrame(splits).T.astype(float).round(6)

# %%
dapo_rows = pd.DataFrame(splits)["dapo"].T.astype(float)
bnpo_rows = pd.DataFrame(splits)["bnpo"].T.astype(float)
claim("dapo: 損失は切り方によらない", dapo_rows["loss"].to_numpy(),
      dapo_rows["loss"].iloc[0], tol=1e-6)
claim("dapo: 勾配のノルムも", dapo_rows["grad_norm"].to_numpy(),
      dapo_rows["grad_norm"].iloc[0], tol=1e-5)
check("bnpo: 切り方で変わる", np.ptp(bnpo_rows["loss"]) > 0.01,
      f"{bnpo_rows['loss'].min():.4f}〜{bnpo_rows['loss'].max():.4f}")

# %% [markdown]
# 2 つのプロセスで走らせても、値は同じでした。ノートブックの中では複数のプロセスを動かせないので、これはテスト（ `tests/cases/test_dapo.py` ）で確かめています。

# %% [markdown]
# ### サポートページのコードを CPU で動かす
#
# サポートページの `GRPOTrainer` の例を、ノート PC の CPU で動かします。

# %%
from datasets import Dataset

train_dataset = Dataset.from_list([
    {"prompt": "10未満の素数の合計は？", "ground_truth": "17"},
    {"prompt": "20未満の素数の合計は？", "ground_truth": "77"},
])

# %%
trainer = GRPOTrainer(
    model=str(checkpoint("prime-sums")),  # 変更 1
    processing_class=tokenizer,
    reward_funcs=exact_match,
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(),  # 変更 2
        num_generations=4,
        per_device_train_batch_size=4,
        loss_type="dapo",
        importance_sampling_level="token",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_completion_length=8,  # 変更 3
        bf16=torch.cuda.is_available(),  # 変更 4
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1, max_steps=8,  # 表に出すために、毎回記録します
    ), train_dataset=train_dataset)
first_run = train(trainer)
first_run[["step", "loss", "grad_norm", "reward", "frac_reward_zero_std",
           "clip_ratio/high_mean"]].round(4)

# %% [markdown]
# 変えたのは 4 か所で、かならず要るのは 4 つ目です（ほかに、記録のための設定を足し、 `trainer.train()` の代わりにパッケージの `train` を使いました）。
#
# 1. **モデルは、フォルダの場所で渡します。** DAPO は $\beta=0$ で参照方策が要らないので、モデルそのものを渡してもかまいません。
# 2. **出力先は、一時フォルダにします。**
# 3. **回答の長さの上限を、課題に合わせます。** 既定の上限のままだと、止まりどきを知らないモデルが長々と書いたときに、時間がかかります。
# 4. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
#
# `exact_match` は、5.3.1 節の例の報酬関数です。前後の空白を除いて、正解と一字一句同じなら 1、ほかは 0 です（「77です。」は 0 になります）。
# `frac_reward_zero_std` は、報酬に差のつかなかったグループの割合です。この設定では、1 回の更新に使うのは 1 つのグループだけなので、差がつかなければ、その更新の勾配は 0 です。
# それ以外の更新でも損失が 0 なのは、グループの中で回答の長さがそろっていたからです（ステップ 1）。勾配は 0 ではありません。

# %%
no_signal = first_run["frac_reward_zero_std"] == 1
check("差がつかない更新が、1 回はある", no_signal.any(),
      f"8 回のうち {no_signal.sum()} 回")
claim("その更新では、損失も勾配も 0",
      first_run.loc[no_signal, ["loss", "grad_norm"]].to_numpy(), 0.0, tol=0)
even = first_run["completions/min_length"] == first_run[
    "completions/max_length"]
check("差がついて、長さのそろった更新がある", (even & ~no_signal).any())
claim("そこでは、損失は 0（float32 の丸めまで）",
      first_run.loc[even & ~no_signal, "loss"].to_numpy(), 0.0, tol=1e-6)
check("一度の生成を一度だけ使うので、クリッピングは働かない",
      (first_run["clip_ratio/region_mean"] == 0).all())

# %% [markdown]
# ### 式と TRL の違い
#
# **平均は、バッチの全部のプロンプトについてとります。** 式 (5.16) のとおりにプロンプトごとに平均してから平均した値とは違います（ステップ 3）。

# %%
groups = [slice(k, k + 4) for k in (0, 4, 8)]
by_prompt = torch.stack([
    dapo_loss(logps[k], old_logps[k], A[k], mask[k], 0.2, 0.28)
    for k in groups]).mean().item()
theirs_whole = theirs.loss.item()
both = f"{theirs_whole:.6f} / {by_prompt:.6f}"
differences = {"バッチ全体の平均 / プロンプトごとの平均": both}
check("TRL の値は、プロンプトごとの平均と違う",
      abs(by_prompt - theirs_whole) > 0.01, both)

# %% [markdown]
# **一度の生成を何回かに分けて更新すると、分母は全体の「1 回分」です。** `steps_per_generation=2` とすると、8 つの回答を 4 つずつ 2 回の更新に使います。分母は、それぞれの 4 つのトークン数ではなく、8 つのトークン数の半分です。
# だから、2 回の損失の平均が、まとめて 1 回で更新したときの損失と一致します。この「半分」は TRL 1.10.0 で入りました。1.8.0 では 8 つのトークン数で割っていたので、損失は 2 分の 1 でした。

# %%
halves = logged(4, 1, steps=2, steps_per_generation=2)["loss"]
differences["8 つの回答を 2 回に分けた損失"] = (
    f"{halves[0]:+.4f}、{halves[1]:+.4f}（平均 {halves.mean():+.4f}）")
claim("2 回の平均 = 1 回で更新したときの損失",
      halves.mean(), dapo_rows["loss"].iloc[0], tol=1e-6)

# %% [markdown]
# **差のつかないグループは、捨てられません。** 勾配は 0 でも、トークンは分母に入ります（ステップ 6）。2 つ目のグループを全員正解にして確かめます。

# %%
flat = rewards[:4] + [1.0] * 4 + rewards[8:]
diluted = ask_trl(rewards=flat)
A_flat = diluted.advantages.double()
used = A_flat != 0

# %%
share = mask[used].sum().double() / mask.sum()
kept_loss = dapo_loss(logps[used], old_logps[used], A_flat[used],
                      mask[used], 0.2, 0.28)
claim("TRL の損失 = 差がつくグループの損失 × トークンの割合",
      diluted.loss, share * kept_loss, tol=1e-12)
claim("frac_reward_zero_std", diluted.metrics["frac_reward_zero_std"], 1 / 3,
      tol=1e-6)
differences["差のないグループを捨てない / 捨てる"] = (
    f"{diluted.loss:.6f} / {kept_loss:.6f}")

# %% [markdown]
# **動的サンプリングは、TRL にはありません。** このパッケージの `DynamicSamplingGRPOTrainer` で足します（「学習」で使います）。
#
# **長さに応じた報酬は、TRL にもあります。** `get_soft_overlong_punishment` は式 (5.15) と同じです。パッケージの `overlong_reward` も、TRL の報酬関数として使える形です。全部の長さで比べます。

# %%
from trl.rewards import get_soft_overlong_punishment

from companion.rewards import overlong_reward

ids = [[5] * k for k in range(1, 41)]
for max_length, cache in ((32, 8), (16, 4), (40, 40), (32, 9)):
    of_trl = get_soft_overlong_punishment(max_length, cache)(
        completion_ids=ids)
    of_ours = overlong_reward(max_length, cache)(
        completions=[""] * 40, completion_ids=ids)
    claim(f"L_max = {max_length}、L_cache = {cache}: 40 通りの長さ",
          of_ours, of_trl, tol=1e-12)
differences["長さに応じた報酬"] = "式 (5.15) と同じ"

# %% [markdown]
# **打ち切られた回答を、損失から除く設定があります。** `mask_truncated_completions=True` です（既定値は False）。論文の overlong filtering にあたります。除かれるのは損失だけで、報酬はグループの平均に残ります。

# %%
filtered = ask_trl(mask_truncated_completions=True)
claim("アドバンテージは変わらない", filtered.advantages, theirs.advantages,
      tol=0)
claim("打ち切られた回答（最後の行）のトークンは 0 個",
      filtered.batch["completion_mask"].sum(-1)[-1], 0)
differences["打ち切られた回答を残す / 除く"] = (
    f"{theirs_whole:.6f} / {filtered.loss:.6f}")
check("損失は変わる", abs(filtered.loss - theirs_whole) > 0.001,
      differences["打ち切られた回答を残す / 除く"])

# %% [markdown]
# **サポートページの設定では、クリッピングは働きません。** 一度の生成を一度だけ使うと、比はいつも 1 だからです。 $\epsilon_{\mathrm{high}}$ を変えても、損失も勾配も同じです。

# %%
once = {high: ask_trl(updates=1, epsilon_high=high) for high in (0.28, 5.0)}
claim("ε_high = 0.28 と 5 で、損失が同じ", once[0.28].loss, once[5.0].loss,
      tol=0)
norms = [torch.stack([g.norm() for g in result.gradients.values()]).norm()
         for result in once.values()]
claim("勾配のノルムも同じ", *norms, tol=0)
differences["一度の生成を一度だけ使う"] = "比は 1、クリッピング率は 0"
claim("クリッピング率", once[0.28].metrics["clip_ratio/region_mean"], 0.0)

# %% [markdown]
# 最後に、既定値を並べます。 `loss_type` の既定値は "dapo" ですが、 `epsilon_high` を書かなければ上側も `epsilon` です。既定値のままでは、DAPO の四つの手当てのうち、トークンの平均だけが入ります。

# %%
defaults = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False)
for name in ("loss_type", "epsilon", "epsilon_high", "beta",
             "scale_rewards", "mask_truncated_completions", "num_iterations",
             "num_generations", "max_completion_length", "temperature"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
check("既定の損失は dapo、上側は広げない",
      (defaults.loss_type, defaults.epsilon_high) == ("dapo", None))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、DAPO の四つの手当てを全部入れて学習させます。課題は素数の合計（「20未満の素数の合計は？」→ 77）です。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。100 個の問題は暗記できる数で、学習する問題と測る問題は同じです。モデルは答えを「知って」いて、強化学習は、それを確実に出すようにする、という課題です。
#
# 損失とクリッピングは、サポートページの設定のままです。動的サンプリングには、パッケージの `DynamicSamplingGRPOTrainer` を使います。TRL の `GRPOTrainer` が回答を生成して採点したあとに割り込み、差のつかないグループを捨て、足りない分の問題を引いて、生成し直します。勾配蓄積でも、複数のプロセスでも働きます（ `tests/training/test_dynamic_sampling.py` で確かめています）。
# 長さに応じた報酬は、報酬関数のリストに足すだけです。引き直しの判定に使うのは、リストの先頭の、正解の報酬です（引数 `correctness` で変えられます）。

# %%
from dataclasses import asdict

from companion.training import DynamicSamplingGRPOTrainer, preset

dapo_preset = preset("dapo")
pd.DataFrame([asdict(dapo_preset)])


# %%
def new_trainer(reward_funcs, **options):
    return DynamicSamplingGRPOTrainer(
        model=str(checkpoint("prime-sums", dapo_preset.size)),
        reward_funcs=reward_funcs,
        args=GRPOConfig(**page, max_completion_length=8,
                        **dapo_preset.arguments()),
        processing_class=tokenizer,
        train_dataset=problems(PRIME_SUMS, dapo_preset.examples, seed=0),
        **options)

# %%
trainer = new_trainer([exact_match, overlong_reward(max_length=8, cache=3)])
for name in ("temperature", "top_p", "top_k", "max_completion_length",
             "num_generations", "num_iterations"):
    print(f"{name} = {getattr(trainer.args, name)}")

# %% [markdown]
# 回答の上限は 8 トークンで、罰は 6 トークンから始まります。いちばん長い正解（4 桁と EOS）は 5 トークンなので、正解は罰されません。

# %%
history = train(trainer)

# %%
from companion.plots import curves

sampling = "dynamic_sampling/"
curves(history, {
    "正解の割合（引いた全部）": "rewards/exact_match/mean",
    "報酬の標準偏差（引いた全部）": "reward_std",
    "長さの罰（平均）": "rewards/overlong_reward/mean",
    "捨てたグループの割合": {
        "全部正解": sampling + "all_right_share",
        "全部不正解": sampling + "all_wrong_share"},
    "追加の生成（回）": sampling + "extra_rounds",
    "エントロピー（nat／トークン）": "entropy",
    "回答の長さ（トークン）": "completions/mean_length",
    "打ち切りの割合": "completions/clipped_ratio",
    "勾配のノルム": "grad_norm",
})

# %% [markdown]
# 正解の割合は上がり、そのぶん「全部正解」で捨てられるグループが増え、追加の生成が要るようになります。「全部不正解」は、はじめのうちに、わずかにあるだけです。
# 勾配のノルムは、学習の終わりまで小さくなりません。バッチが、いつも差のつくグループで満たされているためと考えられます。
# 打ち切りはまれで、長さの罰はほとんど働きません。この課題では、長さは問題になっていないのです。

# %%
right_share = history["rewards/exact_match/mean"]
check("正解の割合が 0.3 以上あがる",
      right_share.iloc[-1] - right_share.iloc[0] > 0.3,
      f"{right_share.iloc[0]:.3f} → {right_share.iloc[-1]:.3f}")

# %%
dropped = history[sampling + "dropped_share"]
check("終わりには、引いたグループの 2 割以上を捨てている",
      dropped.iloc[-1] > 0.2, f"{dropped.iloc[-1]:.3f}")
all_wrong = history[sampling + "all_wrong_share"]
check("全部不正解のグループは、終わりの半分にはほとんどない",
      all_wrong.iloc[len(history) // 2:].max() < 0.02)
check("打ち切りは 1% に満たない",
      history["completions/clipped_ratio"].max() < 0.01)
norms = history["grad_norm"]
check("勾配のノルムは、終わりでも、はじめの半分より大きい",
      norms.iloc[-3:].mean() > norms.iloc[:3].mean() / 2)

# %% [markdown]
# 一度の生成を一度だけ使う設定なので、比はいつも 1 で、クリッピングは一度も働いていません。clip-higher は、設定には入っていますが、この学習では何もしていません。

# %%
claim("クリッピングは一度も働かない",
      history["clip_ratio/region_mean"].to_numpy(), 0.0)

# %% [markdown]
# 学習の前と後を比べます。「貪欲法」は、いちばん確率の高い文字を選びつづけたとき、「サンプリング」は、温度 1 で引いたときの正解率です。

# %%
from companion.lm import (
    completion_batch,
    generate,
    measure,
    sequence_log_probs,
)
from companion.plots import before_after

sft_model, _ = load("prime-sums", dapo_preset.size)
prompts = PRIME_SUMS.test_prompts
models = {"学習前": sft_model, "学習後": trainer.model}
scores = {name: measure(lm, tokenizer, PRIME_SUMS, prompts, samples=2)
          for name, lm in models.items()}

# %%
titles = {"sampled": "サンプリング", "greedy": "貪欲法"}
before_after(
    {title: [score[key] for score in scores.values()]
     for key, title in titles.items()}, limits=(0, 1), title="正解率")

# %%
before, after = scores.values()
check("サンプリングの正解率が 0.3 以上あがる",
      after["sampled"] - before["sampled"] > 0.3,
      f"{before['sampled']:.3f} → {after['sampled']:.3f}")
check("貪欲法の正解率は 0.9 以上を保つ", after["greedy"] > 0.9,
      f"{before['greedy']:.3f} → {after['greedy']:.3f}")

# %%
samples = pd.DataFrame({"プロンプト": prompts[::12]})
for name, lm in models.items():
    ys = generate(lm, tokenizer, prompts[::12], max_new_tokens=8,
                  temperature=1.0)
    samples[name] = [
        f"{y} {'○' if y == PRIME_SUMS.answer(x) else '×'}"
        for x, y in zip(prompts[::12], ys, strict=True)]
samples

# %% [markdown]
# ### 捨てる割合を、式から予想する
#
# ステップ 5 の式に、問題ごとの正解率を入れて、差のつかないグループの割合を予想します。正解率は、正解の文字列（と EOS）の確率そのものなので、引いてみなくても計算できます。
# それを、100 個の問題に 8 回ずつ答えさせて測った割合と比べます。

# %%
rows = completion_batch(
    tokenizer, prompts, [PRIME_SUMS.answer(x) for x in prompts])


def right_probability(lm):
    """問題ごとの、正解の文字列の確率 (100,)。"""
    with torch.no_grad():
        return sequence_log_probs(lm, **{
            key: ids.to(lm.device) for key, ids in rows.items()}).exp().cpu()


# %%
def measured_share(lm):
    """8 回ずつ答えさせたときの、差のつかないグループの割合。"""
    asked = [x for x in prompts for _ in range(8)]
    ys = generate(lm, tokenizer, asked, max_new_tokens=8, temperature=1.0)
    correct = torch.tensor([float(y == PRIME_SUMS.answer(x))
                            for x, y in zip(asked, ys, strict=True)])
    return degenerate_groups(correct, 8).double().mean().item()


# %%
shares = {}
for name, lm in models.items():
    p = right_probability(lm)
    shares[name] = {
        "平均の正解率": p.mean().item(),
        "平均の正解率から予想": (p.mean()**8 + (1 - p.mean())**8).item(),
        "問題ごとの正解率から予想": (p**8 + (1 - p)**8).mean().item(),
        "測った割合": measured_share(lm)}
share_table = pd.DataFrame(shares).T
share_table.round(3)

# %%
by_problem, found = share_table.iloc[:, 2], share_table.iloc[:, 3]
check("問題ごとの正解率からの予想は、測った割合に近い",
      (by_problem - found).abs().max() < 0.08,
      f"差 {(by_problem - found).abs().max():.3f} 以下")
check("学習後には、4 割前後のグループに差がつかない",
      0.25 < found["学習後"] < 0.65, f"{found['学習後']:.2f}")

# %% [markdown]
# ### 差のつくグループが、どこにもないとき
#
# データの問題が全部解けてしまう（あるいは、一つも解けない）と、いくら引いてもバッチは埋まりません。 `DynamicSamplingGRPOTrainer` は `max_rounds` 回であきらめて、何がどれだけあったかを知らせます。何を答えても正解にする報酬関数で試します。

# %%
def always_right(completions, **columns):
    return [1.0] * len(completions)


message = message_of(
    lambda: train(new_trainer(always_right, max_rounds=3)))
message

# %%
groups_drawn = 3 * dapo_preset.batch_size // dapo_preset.group_size
check("引いた数と、全部正解だった数が書いてある",
      f"of {groups_drawn} groups drawn {groups_drawn} were all right"
      in message)

# %% [markdown]
# ## 実験
#
# もう一度、全部を数え上げられる世界に戻ります。方策は表形式、損失は TRL と一致すると確かめた `dapo_loss` です。8 つの乱数の種（シード）をまとめて学習し、図では線が中央値、帯が最小値から最大値までです。
#
# ### 実験 1：論文の表を、小さな世界でたどる
#
# 論文の表 1 は、Qwen2.5-32B に工夫を一つずつ **足していった** ときの、AIME 2024 の点数です（32 回引いた平均）。GRPO の 30 点から、打ち切られた回答を損失から除いて 36、クリッピングの上側を広げて 38、長さの罰で 41、トークンの平均で 42、動的サンプリングで 50 点になりました。
# 同じ順に足していきます。世界は次のとおりです。
#
# - プロンプトは 32 個。文字は 2 つ、回答は最長 5 トークンで、EOS なしの 5 文字は「打ち切り」です。
# - 正解は、プロンプトごとに一つ、EOS を含めて 2 か 3 トークンの回答です。はじめの方策は、正解を 0.01〜0.6 の確率で出し、3 割ほどの回答が打ち切られます。
# - 1 回の生成では、8 個のプロンプトから 8 個ずつ引き（ $G=8$ ）、同じ回答で 8 回更新します（Adam）。これを 40 回繰り返します。
# - 長さの罰は $L_{\max}=5$、 $L_{\mathrm{cache}}=2$、つまり 4 トークンで $-0.5$、5 トークンで $-1$ です。正解は罰されません。
#
# 測るのは、正解の確率の **正確な** 平均です（罰は含めません）。たくさんありうる設定の一つにすぎないことは、覚えておいてください。

# %%
S, X, P, G, K = 8, 32, 8, 8, 8  # シード、プロンプト、1 回に使う数、G、更新
tasks = World(prompts=X, letters=2, max_length=5)
length_of = tasks.mask.sum(-1)
ends = torch.tensor([y.endswith("$") for y in tasks.responses])
seeds = torch.arange(S)[:, None, None]

# %%
g = torch.Generator().manual_seed(0)
rambling = tasks.random_logits(g, S)
rambling[..., -1] -= 1.0  # EOS を出しにくくする
short = (ends & (length_of > 1) & (length_of <= 3)).nonzero().squeeze()
right = short[torch.randint(len(short), (S, X, 1), generator=g)]
known = 0.01 * 60.0 ** torch.rand(S, X, 1, generator=g, dtype=torch.float64)
start_probs = (1 - known) * tasks.log_probs(rambling).exp()
start_probs = start_probs.scatter_add(-1, right, known)
start_logits = tasks.logits_of(start_probs.log())

# %%
start_probs = tasks.log_probs(start_logits).exp()
start_right = start_probs.gather(-1, right)
print(f"正解の確率 {start_right.min():.3f}〜{start_right.max():.3f}、"
      f"平均 {start_right.mean():.3f}、"
      f"打ち切りの確率 {start_probs[..., ~ends].sum(-1).mean():.3f}")


# %% [markdown]
# 一度の生成です。動的サンプリングでは、32 個のプロンプトを順に引き、差のつくグループを 8 個集めます。生成は 8 個単位で行い、使わなかったグループも数に入れます。集まらなければ、差のないグループで埋めます。

# %%
from companion.exact import sample


def draw(logps, dynamic, g):
    """プロンプト (S, P)、回答 (S, P, G)、生成したグループの数 (S,)。"""
    x = torch.rand(S, X, generator=g).argsort(-1)
    at = seeds[..., 0], x
    y = sample(logps.exp()[at], G, g)
    if not dynamic:
        return x[:, :P], y[:, :P], torch.full((S,), P)
    correct = (y == right[at]).double()
    same = degenerate_groups(correct.flatten(), G).view(S, X)
    used = same.int().sort(dim=-1, stable=True).indices[:, :P]
    drawn = (used.amax(-1) // P + 1) * P
    drawn[(~same).sum(-1) < P] = X  # 全部引いても足りなかった
    return x.gather(1, used), y[seeds[..., 0], used], drawn


# %% [markdown]
# 学習です。損失の平均のとり方は、アドバンテージに掛ける重みで選びます（「実装」の恒等式）。シードどうしはパラメータを共有しないので、シードごとの損失の平均をとれば、それぞれ独立に学習します。

# %%
def loss_weights(mask, by_token):
    """回答で平均するか、シードごとにトークンで平均するか。"""
    tokens = mask.view(S, -1).sum(-1).repeat_interleave(P * G)
    return 1 / (tokens if by_token else
                P * G * mask.sum(-1).clamp(min=1)).double()


def penalised(y, correct, soft):
    return correct + soft * overlong_penalty(length_of[y].double(), 5, 2)


# %%
def learn(filtered=False, high=0.2, soft=0.0, by_token=False, dynamic=False,
          only_mixed=False, rounds=40):
    g = torch.Generator().manual_seed(1)
    theta = start_logits.clone().requires_grad_()
    optimizer = Adam([theta], lr=0.03)
    trace, answers = [tasks.log_probs(theta).detach()], [torch.zeros(S)]
    for _ in range(rounds):
        x, y, drawn = draw(trace[-1], dynamic, g)
        correct = (y == right[seeds[..., 0], x]).double()
        A = group_advantages(penalised(y, correct, soft).flatten(), G)
        if only_mixed:  # 正解だけでは差のつかないグループを使わない
            same = degenerate_groups(correct.flatten(), G)
            A = A * ~same.repeat_interleave(G)
        mask = (tasks.mask[y] & (ends[y] | (not filtered))[..., None])
        mask = mask.flatten(0, 2)
        A = A * loss_weights(mask, by_token)
        at = (seeds[..., None], x[..., None, None],
              tasks.prefixes[y], tasks.tokens[y])
        update(theta, optimizer, at, A, mask, high)
        trace.append(tasks.log_probs(theta).detach())
        answers.append(answers[-1] + drawn * G)
    return torch.stack(trace, 1).exp(), torch.stack(answers, 1)


# %%
def update(theta, optimizer, at, A, mask, high):
    """同じ回答で K 回の更新。"""
    old = theta.detach().log_softmax(-1)[at].flatten(0, 2)
    for _ in range(K):
        logps = theta.log_softmax(-1)[at].flatten(0, 2)
        optimizer.zero_grad()
        dapo_loss(logps, old, A, mask, 0.2, high, num_tokens=S).backward()
        optimizer.step()


def reward_of(probs):
    """正解の確率の平均 (S, 更新の回数)。"""
    at = right[:, None].expand(-1, probs.shape[1], -1, -1)
    return probs.gather(-1, at).mean((-2, -1))


# %%
PAPER = {"GRPO": 30, "＋打ち切りを除く": 36, "＋上側を広げる": 38,
         "＋長さの罰": 41, "＋トークン平均": 42, "＋動的サンプリング": 50}
steps = [{}, dict(filtered=True), dict(high=0.28), dict(soft=1.0),
         dict(by_token=True), dict(dynamic=True)]
ladder, settings = {}, {}
for name, step in zip(PAPER, steps, strict=True):
    settings = settings | step
    ladder[name] = learn(**settings)
final = {name: reward_of(probs)[:, -1]
         for name, (probs, _) in ladder.items()}

# %%
drawn, (axes,) = figure(1, 2, panel=(4.6, 3.4))
axes[0].plot(list(PAPER.values()), "o-", color=GREY)
axes[0].set(title="論文：AIME 2024 の点数", ylim=(25, 55))
for k, dots in enumerate(final.values()):
    axes[1].plot(np.full(S, k) + np.linspace(-0.15, 0.15, S), dots, "o",
                 color=COLOURS[0], alpha=0.45, markersize=5)
axes[1].plot([dots.quantile(0.5) for dots in final.values()], "o-",
             color=COLOURS[0])
axes[1].set(title="この世界：正解の確率（8 シードと中央値）")
axes[0].set_ylabel("点数")
axes[1].set_ylabel("正解の確率")
for ax in axes:
    ax.set_xticks(range(6), list(PAPER), rotation=35, ha="right")
drawn

# %%
rungs = pd.DataFrame({
    name: {"論文": PAPER[name], "中央値": dots.quantile(0.5).item(),
           "最小": dots.min().item(), "最大": dots.max().item(),
           "生成した回答": ladder[name][1][:, -1].mean().item()}
    for name, dots in final.items()}).T

# %%
change = torch.stack(list(final.values())).diff(dim=0)
rungs["前の段との差"] = "–"
for name, d in zip(list(PAPER)[1:], change, strict=True):
    rungs.loc[name, "前の段との差"] = f"{d.min():+.3f}〜{d.max():+.3f}"
rungs.astype({"論文": int, "生成した回答": int}).round(3)

# %%
by_filter, by_clip, by_penalty, by_mean, by_dynamic = change
check("打ち切りを除く: 8 シードすべてで少し下がる",
      -0.05 < by_filter.min() and by_filter.max() < -0.005,
      f"{by_filter.min():+.3f}〜{by_filter.max():+.3f}")
check("上側を広げる: 差は 0.02 に届かない", by_clip.abs().max() < 0.02,
      f"{by_clip.min():+.3f}〜{by_clip.max():+.3f}")
check("長さの罰: 8 シードすべてで大きく下がる", by_penalty.max() < -0.03,
      f"{by_penalty.min():+.3f}〜{by_penalty.max():+.3f}")

# %%
check("トークン平均: シードによって上がったり下がったり",
      by_mean.min() < -0.01 < 0.01 < by_mean.max(),
      f"{by_mean.min():+.3f}〜{by_mean.max():+.3f}")
check("動的サンプリング: 8 シードすべてで大きく上がる",
      by_dynamic.min() > 0.08,
      f"{by_dynamic.min():+.3f}〜{by_dynamic.max():+.3f}")
total = final["＋動的サンプリング"] - final["GRPO"]
check("全部足すと、8 シードすべてで GRPO を上回る", total.min() > 0.01,
      f"{total.min():+.3f}〜{total.max():+.3f}")
cost = (ladder["＋動的サンプリング"][1] / ladder["GRPO"][1])[:, -1]
check("生成した回答の数は、8 シードすべてで 2 倍以上", cost.min() > 2,
      f"{cost.min():.2f}〜{cost.max():.2f} 倍")

# %% [markdown]
# 更新の回数をそろえて比べると、全部を足した DAPO が GRPO を上回ります。ここは論文と同じです。けれども、途中の段は違います。見えたものと、見えなかったものを分けておきます。
#
# - **打ち切りを除く** 論文では +6 点、ここでは少し **下がりました**。論文は、打ち切られただけの正しい推論まで罰してしまうことを問題にしています。この世界では、打ち切られた回答は本当に不正解なので、除くと、手がかりを捨てるだけになるのだと考えられます。
# - **上側を広げる** +2 点。ここでは、どのシードでも 0.02 に届かない、わずかな差です。実験 2 で、効く設定を探します。
# - **長さの罰** +3 点。ここでは大きく **下がりました**。論文の報酬は正解が $+1$、不正解が $-1$ なので、罰の重さは、正解との比で、ここの半分です。けれども、重さのせいではないことを、次に確かめます。
# - **トークン平均** +1 点。ここでは、シードのばらつきに埋もれます。
# - **動的サンプリング** +8 点。ここでも、いちばん大きく上がりました。ただし、罰で失った分を取り戻した大きさも入っています（GRPO に動的サンプリングだけを足した大きさは、あとで測ります）。生成した回答の数も 2 倍を超えています。
#
# 論文の点数も、1 回ずつの学習の結果で、ばらつきは書かれていません。足す順序を変えれば、配分も変わるでしょう。
#
# ### 長さの罰は、なぜ成績を下げたのか
#
# ステップ 7 で見たことが起きているのなら、原因は、全員が不正解（または全員が正解）のグループです。罰を足しただけの GRPO で確かめます。正解だけでは差のつかないグループのアドバンテージを 0 にすると、どうなるでしょうか。また、罰を 10 分の 1 にするとどうでしょうか。

# %%
penalty_runs = {
    "GRPO": {}, "罰を足す": dict(soft=1.0),
    "罰を 1/10 にする": dict(soft=0.1),
    "罰、差のつくグループだけ": dict(soft=1.0, only_mixed=True)}
by_case = {name: learn(**case)[0] for name, case in penalty_runs.items()}

# %%
ended = {name: reward_of(probs)[:, -1] for name, probs in by_case.items()}
cut = {name: probs[:, -1][..., ~ends].sum(-1).mean(-1)
       for name, probs in by_case.items()}
pd.DataFrame({name: {
    "正解の確率（中央値）": ended[name].quantile(0.5).item(),
    "最小": ended[name].min().item(), "最大": ended[name].max().item(),
    "打ち切りの確率（中央値）": cut[name].quantile(0.5).item()}
    for name in penalty_runs}).T.round(3)

# %%
plain, full, tenth, mixed_only = ended.values()
check("罰を足すと、8 シードすべてで下がる", (full - plain).max() < -0.05,
      f"{(full - plain).min():+.3f}〜{(full - plain).max():+.3f}")
check("罰を 10 分の 1 にしても、下がる", (tenth - plain).max() < -0.03,
      f"{(tenth - plain).min():+.3f}〜{(tenth - plain).max():+.3f}")

# %%
back = mixed_only - full
check("差のつくグループだけに使えば、8 シードすべてで戻る",
      back.min() > 0.03, f"{back.min():+.3f}〜{back.max():+.3f}")
recovered = (back / (plain - full)).quantile(0.5)
check("中央値では、失った分の 6 割以上が戻る", recovered > 0.6,
      f"{recovered:.0%}")
check("打ち切りは、8 シードすべてで減る",
      (cut["罰を足す"] < cut["GRPO"]).all())

# %% [markdown]
# 正解がめったに出ないプロンプトでは、グループの全員が不正解です。そこに罰を足すと、短い不正解ほどほめられ、std で割るので、その強さは罰の大きさによりません。方策は、正解を見つける前に「短ければよい」と学んでしまいます（演習ノートブックの問 4 に、もっと小さな例があります）。
# 長さの罰と、 **正解で判定する** 動的サンプリングは、組で使うものなのです。論文の順では罰が先に入りますが、そこで下がらなかったのは、罰のかかる長さの回答が全体の一部だけだったからかもしれません（論文では 16,384 トークンまで罰がありません）。
#
# ### 動的サンプリングは、何を払って何を得たか
#
# 動的サンプリングだけを GRPO に足し、更新の回数と、生成した回答の数の、2 つの物差しで比べます。回答の数をそろえるため、GRPO は長めに学習させます。

# %%
probs, answers_dynamic = learn(dynamic=True)
with_dynamic = reward_of(probs)
probs, answers_plain = learn(rounds=100)
without = reward_of(probs)

# %%
from companion.plots import spread

drawn, (axes,) = figure(1, 2, panel=(4.4, 3.2))
for name, colour, run in (("GRPO", GREY, without[:, :41]),
                          ("＋動的サンプリング", COLOURS[0], with_dynamic)):
    spread(range(0, 41 * K, K), run, name, ax=axes[0], colour=colour,
           xlabel="更新回数", title="更新の回数で比べる")

# %%
budget = np.linspace(0, 5_600, 57)
for name, colour, run, n in (
        ("GRPO", GREY, without, answers_plain),
        ("＋動的サンプリング", COLOURS[0], with_dynamic, answers_dynamic)):
    lines = [np.interp(budget, *pair) for pair in zip(n, run, strict=True)]
    spread(budget, lines, name, ax=axes[1], colour=colour,
           xlabel="生成した回答の数", title="回答の数で比べる")
axes[0].set_ylabel("正解の確率")
axes[1].set_xticks(range(0, 5_001, 1_000))
drawn

# %%
same_updates = with_dynamic[:, -1] - without[:, 40]
check("更新の回数が同じなら、8 シードすべてで動的サンプリングが上",
      same_updates.min() > 0.02,
      f"{same_updates.min():+.3f}〜{same_updates.max():+.3f}")

# %%
at_budget = {n: torch.tensor([
    np.interp(n, a, r) - np.interp(n, b, q) for a, r, b, q in zip(
        answers_dynamic, with_dynamic, answers_plain, without, strict=True)])
    for n in (1_000, 2_000, 4_000)}
for n, difference in at_budget.items():
    print(f"回答 {n:,} 個: {difference.min():+.3f}〜{difference.max():+.3f}")
check("回答の数が同じなら、3 か所とも、8 シードすべてで下",
      max(difference.max() for difference in at_budget.values()) < -0.005)

# %%
answers_all = ladder["＋動的サンプリング"][1][:, -1]
same_cost = torch.tensor([np.interp(*one_seed) for one_seed in zip(
    answers_all, answers_plain, without, strict=True)])
versus = final["＋動的サンプリング"] - same_cost
check("回答の数が同じなら、全部を足した DAPO と GRPO の優劣はシードしだい",
      versus.min() < -0.005 < 0.005 < versus.max(),
      f"{versus.min():+.3f}〜{versus.max():+.3f}")

# %% [markdown]
# 1 回の更新の質は上がりましたが、同じ数の回答を生成するなら、捨てずに更新を重ねたほうが、ここでは早く進みました。工夫を全部足した DAPO と、同じ数の回答まで学習させた GRPO とでは、優劣はシードによって変わります。実験 1 で見えた差は、回答を 2 倍あまり多く使った差でもあるのです。
# 論文では、生成の時間を決めるのはいちばん長い回答で、引き直しによる増え方は目立たず、更新の回数が減る分、全体ではかえって早かったとされています。動的サンプリングが得になるかどうかは、生成と更新の、どちらが高くつくかによります。

# %% [markdown]
# ### 実験 2：clip-higher が効く設定を探す
#
# 実験 1 では、上側を広げてもほとんど何も起きませんでした。効くとすれば、正解がめったに出ず、一度の生成で何度も更新し、そのたびに上側のクリッピングで止まる、というときでしょう。
# 一度の生成で確率が 1.2 倍までしか上がらないなら、0.01 から 0.5 まで上がるには $\log50/\log1.2=21.5$ 回の生成が要ります。1.28 倍までなら $\log50/\log1.28=15.8$ 回で、26% 少なくなります。
#
# 1 トークンの回答が 8 通りあり、1 つだけが正解で、はじめの確率は 0.01、いちばん多い不正解が 0.5、残りは等しいとします。 $G=256$、1 回の生成で 16 回更新し、SGD と Adam で比べます。上側を切らない場合（ $\epsilon_{\mathrm{high}}=\infty$ 、計算では 1000）も試します。

# %%
def rare_answer(optimizer, lr, high, group=256, updates=16, rounds=24):
    """まれな正解の確率 (S, 生成の回数 + 1)。"""
    g = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.01, 0.5, *[0.49 / 6] * 6], dtype=torch.float64)
    theta = probs.log().repeat(S, 1).requires_grad_()
    optimizer = optimizer([theta], lr=lr)
    trace = [theta.detach().log_softmax(-1)]
    for _ in range(rounds):
        y = torch.multinomial(trace[-1].exp(), group, True, generator=g)
        A = group_advantages((y == 0).double().flatten(), group)
        old = trace[-1].gather(-1, y).view(-1, 1)
        for _ in range(updates):
            logps = theta.log_softmax(-1).gather(-1, y).view(-1, 1)
            optimizer.zero_grad()
            dapo_loss(logps, old, A, torch.ones_like(old), 0.2, high,
                      num_tokens=group).backward()  # シードごとの平均の和
            optimizer.step()
        trace.append(theta.detach().log_softmax(-1))
    return torch.stack(trace, 1)[..., 0].exp()


# %%
HIGHS = {"0.2": 0.2, "0.28": 0.28, "∞": 1e3}
OPTIMIZERS = {"SGD、学習率 0.1": (SGD, 0.1),
              "Adam、学習率 0.01": (Adam, 0.01),
              "Adam、学習率 0.02": (Adam, 0.02)}
rare = {(way, high): rare_answer(*setting, value)
        for way, setting in OPTIMIZERS.items()
        for high, value in HIGHS.items()}

# %%
drawn, (axes,) = figure(1, 3, panel=(3.6, 3.0))
for ax, way in zip(axes, OPTIMIZERS, strict=True):
    for high, colour in zip(HIGHS, (GREY, *COLOURS), strict=False):
        spread(range(25), rare[way, high], f"ε_high = {high}", ax=ax,
               colour=colour, xlabel="生成の回数", title=way)
axes[0].set_ylabel("まれな正解の確率")
drawn

# %%
def until_half(probs):
    """確率が 0.5 を超えるまでの生成の回数。"""
    assert (probs[:, -1] > 0.5).all()
    return (probs > 0.5).double().argmax(-1)

# %%
needed = {key: until_half(probs) for key, probs in rare.items()}
growth = {key: (p[:, 1:] / p[:, :-1])[p[:, :-1] < 0.3].quantile(0.5).item()
          for key, p in rare.items()}  # 0.3 を超えるまで
pd.DataFrame({key: {
    "1 回の生成での倍率（中央値）": f"{growth[key]:.2f}",
    "0.5 を超えるまでの生成（中央値）": n.double().quantile(0.5).item(),
    "最小": n.min().item(), "最大": n.max().item()}
    for key, n in needed.items()}).T

# %%
sgd, adam_slow, adam_fast = OPTIMIZERS
narrow, wide = needed[sgd, "0.2"], needed[sgd, "0.28"]
saved = 1 - wide.double().mean() / narrow.double().mean()
check("SGD: 8 シードすべてで、0.28 のどれもが 0.2 のどれよりも早い",
      wide.max() < narrow.min() and 0.15 < saved < 0.28,
      f"生成は平均 {saved:.0%} 少ない")
check("SGD: 1 回の生成での倍率は、1 + ε_high を少し超えたところ",
      1.2 < growth[sgd, "0.2"] < 1.25
      and 1.28 < growth[sgd, "0.28"] < 1.34)

# %%
for way in (adam_slow, adam_fast):
    apart = needed[way, "0.2"] - needed[way, "0.28"]
    check(f"{way}: 違いは 1 回以下", 0 <= apart.min() and apart.max() <= 1)
    check("上側を切らなければ、8 シードすべてで 0.2 より早い",
          needed[way, "∞"].max() < needed[way, "0.2"].min())
    check("倍率は、1.28 を超えている", growth[way, "0.2"] > 1.28,
          f"{growth[way, '0.2']:.2f}")

# %% [markdown]
# **見つかりました。** SGD では、1 回の生成での倍率が、ほぼ $1+\epsilon_{\mathrm{high}}$ で頭打ちになり、clip-higher にすると、まれな正解が多数派になるまでの生成の回数が 2 割ほど減りました。行き過ぎ（ステップ 4）の分だけ、どちらも見積もりより早く着いています。
# 同じ課題でも、Adam では、違いは 1 回以下でした。上側を切らなければもっと早く着くので、クリッピングは歩みを遅らせています。けれども、倍率は $1+\epsilon_{\mathrm{high}}$ で頭打ちになっていません。上側で止まっても、慣性と、残った誤答の項の勾配で進みつづけるのでしょう（ステップ 4 の図）。実験 1 でほとんど見えなかったのも、Adam を使い、正解の多くがそれほどまれではなかったためと考えられます。
#
# 論文が clip-higher に期待したのは、エントロピーの崩壊を防ぐことでした。そちらはどうでしょうか。エントロピーだけを見るために、報酬が回答と **無関係**（コイン投げ）な課題も試します。学ぶことは何もないので、エントロピーが減れば、それは偶然の偏りが積み重なったものです。回答は 16 通りで、 $G=16$ のグループを 4 つ引いて 8 回更新することを、60 回繰り返します。シードは 32 個です。

# %%
def no_signal_entropy(optimizer, lr, high, seeds=32, rounds=60):
    """報酬が回答と無関係なときの、エントロピー (seeds, rounds + 1)。"""
    g = torch.Generator().manual_seed(0)
    probs = 1 / torch.arange(1.0, 17.0).double()  # 16 通り、1/k に比例
    theta = probs.log().repeat(seeds, 1).requires_grad_()
    optimizer = optimizer([theta], lr=lr)
    entropy = []
    for _ in range(rounds + 1):
        now = theta.detach().log_softmax(-1)
        entropy.append(-(now.exp() * now).sum(-1))
        y = torch.multinomial(now.exp(), 64, True, generator=g)
        coins = (torch.rand(y.shape, generator=g) < 0.5).double()
        A = group_advantages(coins.flatten(), 16)
        old = now.gather(-1, y).view(-1, 1)
        for _ in range(8):
            logps = theta.log_softmax(-1).gather(-1, y).view(-1, 1)
            optimizer.zero_grad()
            dapo_loss(logps, old, A, torch.ones_like(old), 0.2, high,
                      num_tokens=64).backward()
            optimizer.step()
    return torch.stack(entropy, 1)


# %%
quartiles = {}
for way, setting in (("SGD、学習率 1", (SGD, 1.0)),
                     ("Adam、学習率 0.03", (Adam, 0.03))):
    for high in ("0.2", "0.28"):
        H = no_signal_entropy(*setting, HIGHS[high])
        quartiles[way, f"ε_high = {high}"] = [
            H[0, 0].item(), *H[:, -1].quantile(
                torch.tensor([0.25, 0.5, 0.75]).double()).tolist()]
columns = ["はじめ", "終わりの第 1 四分位", "中央値", "第 3 四分位"]
entropies = pd.DataFrame(quartiles, index=columns).T
entropies.round(2)

# %%
for way in ("SGD、学習率 1", "Adam、学習率 0.03"):
    narrow, wide = (entropies.loc[way, f"ε_high = {h}"]
                    for h in ("0.2", "0.28"))
    check(f"{way}: 四分位の範囲が重なる",
          wide["終わりの第 1 四分位"] < narrow["第 3 四分位"]
          and narrow["終わりの第 1 四分位"] < wide["第 3 四分位"])
    check(f"{way}: エントロピーは、どちらでも減る",
          max(narrow["中央値"], wide["中央値"]) < narrow["はじめ"] - 0.15)

# %% [markdown]
# エントロピーは、どちらの幅でも減り、0.2 と 0.28 の差は、シードのばらつきに埋もれました。試した範囲では、clip-higher がエントロピーを保つ、とは言えません。言えるのは、「上側のクリッピングが実際に更新を止めている設定では、上側を広げると、まれな正解が早く育つ」ということだけです。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/5.3.3-dapo.ipynb](exercises/5.3.3-dapo.ipynb) で、DAPO の損失と長さの罰を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **打ち切りが雑音なら** 実験 1 で、打ち切られた回答も、正解と同じ文字で始まっていれば正解とみなして成績を測る（学習の採点は変えない）と、「打ち切りを除く」の効果はどうなるでしょうか。予想してから確かめてください。
# 3. **順序と世界を変える** 実験 1 で、動的サンプリングを長さの罰より先に足すと、表はどう変わるでしょうか。また、正解の長さを 2〜5 トークンにして、正解も罰されるようにすると、全部を足した DAPO は GRPO を上回るでしょうか。
# 4. **費用** 実験 1 の動的サンプリングで、1 回の更新に払う時間を「生成した回答 1 個につき 1、更新 1 回につき $c$ 」とします。 正解の確率の中央値が 0.9 に届くまでの時間で比べると、 $c$ がいくつより大きければ、動的サンプリングのほうが得でしょうか。
# 5. **罰の判定** 「学習」の `new_trainer` で、引数 `correctness=1` とすると（長さの罰で判定すると）、何が起こるでしょうか。エラーの文を読んで説明してください。

# %% [markdown]
# ## 参考文献
#
# - Yu ほか. DAPO: An Open-Source LLM Reinforcement Learning System at Scale. 2025. [arXiv:2503.14476](https://arxiv.org/abs/2503.14476) DAPO の論文です。実験 1 の論文の数は、この論文の表 1 の値です。
# - Shao ほか. DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. 2024. [arXiv:2402.03300](https://arxiv.org/abs/2402.03300) GRPO の論文です。
# - Liu ほか. Understanding R1-Zero-Like Training: A Critical Perspective. 2025. [arXiv:2503.20783](https://arxiv.org/abs/2503.20783) 長さと std による偏りの分析（Dr. GRPO）。5.3.2 節で扱います。
# - Schulman, Wolski, Dhariwal, Radford, Klimov. Proximal Policy Optimization Algorithms. 2017. [arXiv:1707.06347](https://arxiv.org/abs/1707.06347) クリッピングのもとの論文です。
# - TRL 1.12.0 `GRPOTrainer`（`trl/trainer/grpo_trainer.py`）、 `get_soft_overlong_punishment`（`trl/rewards/other_rewards.py`）。
