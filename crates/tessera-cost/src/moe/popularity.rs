//! Which experts are asked for how often, and which ranks hold them.

use tessera_base::random::philox4x32;
use tessera_mesh::split;

use super::Routing;

/// Experts that are equally popular.
#[derive(Debug, Clone, Copy)]
pub(super) struct Class {
    /// How many.
    pub count: f64,
    /// Share of tokens that ask for one of them, 0 to 1.
    pub asked: f64,
}

/// Ranks that hold the same number of experts of each class.
#[derive(Debug, Clone)]
pub(super) struct RankKind {
    /// How many ranks.
    pub ranks: f64,
    /// Experts of each.
    pub experts: f64,
    /// What a rank holds; where placement is mixed, all experts of the group, of which a rank holds any `experts`.
    pub classes: Vec<Class>,
}

/// Experts over ranks.
#[derive(Debug, Clone)]
pub(super) struct Spread {
    /// Whether ranks draw their experts from all of them.
    pub mixed: bool,
    /// Kinds of ranks.
    pub kinds: Vec<RankKind>,
}

/// One expert in so many is hot.
const HOT_OF: u64 = 32;

/// Share of tokens that ask for each expert, in order of experts; adds up to `top_k`. What a placement or a cache of
/// experts is made from. `step` turns the hotspot of [`Routing::W`] 6 and finds the burst of 7, which is each eighth
/// step from 7 on; the order of experts under a power law is a fixed shuffle.
#[must_use]
pub fn popularity(experts: u64, top_k: u64, ep: u32, tokens: f64, routing: Routing, step: u64) -> Vec<f64> {
    let top_k = top_k.min(experts);
    if experts == 0 {
        return Vec::new();
    }
    let mut asked: Vec<f64> = match routing {
        Routing::PowerLaw(alpha) => {
            let law = Law::new(alpha, tokens);
            let mut drawn: Vec<f64> =
                (0..experts).map(|i| law.at((i as f64 + 0.5) / experts as f64)).collect();
            shuffle(&mut drawn);
            drawn
        }
        Routing::W(n) => (0..experts).map(|e| weight(n, e, experts, ep.max(1), step)).collect(),
        Routing::Balanced | Routing::Random => vec![1.0; experts as usize],
    };
    let mut classes: Vec<Class> = asked.iter().map(|a| Class { count: 1.0, asked: *a }).collect();
    scale(&mut classes, top_k as f64);
    for (a, c) in asked.iter_mut().zip(&classes) {
        *a = c.asked;
    }
    asked
}

/// The same as few classes over few kinds of ranks.
pub(super) fn spread(experts: u64, top_k: u64, ep: u32, tokens: f64, routing: Routing) -> Spread {
    match routing {
        Routing::PowerLaw(alpha) => mixed(experts, top_k, ep, &Law::new(alpha, tokens)),
        Routing::W(n @ 1..=7) if n != 4 => fixed(experts, top_k, ep, n),
        _ => {
            let asked = top_k as f64 / experts as f64;
            let kind = |(ranks, held): (u32, u64)| RankKind {
                ranks: f64::from(ranks),
                experts: held as f64,
                classes: vec![Class { count: held as f64, asked }],
            };
            Spread { mixed: false, kinds: sizes(experts, ep).into_iter().map(kind).collect() }
        }
    }
}

/// How many ranks hold how many experts: the first ranks hold one more where they do not divide.
fn sizes(experts: u64, ep: u32) -> Vec<(u32, u64)> {
    let (whole, rest) = (experts / u64::from(ep), (experts % u64::from(ep)) as u32);
    [(rest, whole + 1), (ep - rest, whole)].into_iter().filter(|(ranks, _)| *ranks > 0).collect()
}

/// Quantiles of P(x) ~ x^-alpha over 1 to `range`.
struct Law {
    power: f64,
    slope: f64,
    log: f64,
}

impl Law {
    fn new(alpha: f64, tokens: f64) -> Law {
        let range = (0.8 * tokens).max(200.0);
        let power = 1.0 - alpha;
        Law { power, slope: range.powf(power) - 1.0, log: range.ln() }
    }

    /// Popularity of the expert at share `u` of the experts, the most popular first.
    fn at(&self, u: f64) -> f64 {
        let u = 1.0 - u;
        if self.power.abs() < 1e-9 {
            (self.log * u).exp()
        } else {
            (1.0 + self.slope * u).powf(1.0 / self.power)
        }
    }
}

fn mixed(experts: u64, top_k: u64, ep: u32, law: &Law) -> Spread {
    // The most popular one by one, where each counts; the others in groups that grow by an eighth.
    let mut classes = Vec::with_capacity(80);
    let mut at = 0;
    while at < experts {
        let next = (at + 1 + if at < 16 { 0 } else { at / 8 }).min(experts);
        let middle = (at + next) as f64 / 2.0 / experts as f64;
        classes.push(Class { count: (next - at) as f64, asked: law.at(middle) });
        at = next;
    }
    scale(&mut classes, top_k as f64);
    let kind = |(ranks, held): (u32, u64)| RankKind {
        ranks: f64::from(ranks),
        experts: held as f64,
        classes: classes.clone(),
    };
    Spread { mixed: true, kinds: sizes(experts, ep).into_iter().map(kind).collect() }
}

/// The burst's step of workload 7, the first step of the others.
fn fixed(experts: u64, top_k: u64, ep: u32, n: u8) -> Spread {
    // What a rank holds is told by how many experts and how many of them are out of the ordinary.
    let mut kinds: Vec<(u64, u64, f64)> = Vec::new();
    for rank in 0..ep {
        let (start, held) = split(experts, ep, rank);
        let odd = match n {
            1 | 7 => hot(experts).saturating_sub(start).min(held),
            3 => (start + held).div_ceil(HOT_OF) - start.div_ceil(HOT_OF),
            2 | 6 => held * u64::from(rank == 0),
            _ => held * u64::from(ep > 1 && rank + 1 == ep),
        };
        match kinds.iter_mut().find(|k| (k.0, k.1) == (held, odd)) {
            Some(k) => k.2 += 1.0,
            None => kinds.push((held, odd, 1.0)),
        }
    }
    let odd: f64 = kinds.iter().map(|k| k.1 as f64 * k.2).sum();
    let mut both =
        [Class { count: odd, asked: odd_weight(n) }, Class { count: experts as f64 - odd, asked: 1.0 }];
    scale(&mut both, top_k as f64);
    let kind = |(held, odd, ranks): (u64, u64, f64)| RankKind {
        ranks,
        experts: held as f64,
        classes: vec![
            Class { count: odd as f64, asked: both[0].asked },
            Class { count: (held - odd) as f64, asked: both[1].asked },
        ],
    };
    Spread { mixed: false, kinds: kinds.into_iter().map(kind).collect() }
}

/// How popular an expert is under a workload, against the others.
fn weight(n: u8, expert: u64, experts: u64, ep: u32, step: u64) -> f64 {
    let of_rank = |rank: u32| {
        let (start, held) = split(experts, ep, rank);
        (start..start + held).contains(&expert)
    };
    let odd = match n {
        1 => expert < hot(experts),
        2 => of_rank(0),
        3 => expert.is_multiple_of(HOT_OF),
        5 => ep > 1 && of_rank(ep - 1),
        6 => of_rank((step % u64::from(ep)) as u32),
        7 => step % 8 == 7 && expert < hot(experts),
        _ => false,
    };
    if odd { odd_weight(n) } else { 1.0 }
}

/// Popularity of what a workload makes popular or not.
fn odd_weight(n: u8) -> f64 {
    match n {
        1 | 3 => 16.0,
        2 | 6 => 4.0,
        5 => 0.0,
        7 => 64.0,
        _ => 1.0,
    }
}

fn hot(experts: u64) -> u64 {
    experts.div_ceil(HOT_OF)
}

/// Scales popularities so that they add up to `top_k` and none is above 1: a token asks for an expert once, and what
/// one cannot take goes to the others.
fn scale(classes: &mut [Class], top_k: f64) {
    let total: f64 = classes.iter().map(|c| c.count * c.asked).sum();
    let factor = top_k / total.max(1e-300);
    classes.iter_mut().for_each(|c| c.asked *= factor);
    while classes.iter().any(|c| c.asked > 1.0 + 1e-9) {
        let (mut full, mut open) = (0.0, 0.0);
        for c in classes.iter_mut() {
            c.asked = c.asked.min(1.0);
            *(if c.asked < 1.0 { &mut open } else { &mut full }) += c.count * c.asked;
        }
        if open <= 0.0 {
            return;
        }
        let factor = (top_k - full) / open;
        classes.iter_mut().filter(|c| c.asked < 1.0).for_each(|c| c.asked *= factor);
    }
}

/// A fixed shuffle.
fn shuffle(list: &mut [f64]) {
    for i in (1..list.len()).rev() {
        let word = philox4x32([i as u32, 0, 0, 0], [0x7465_7373, 0x6572_6121])[0];
        list.swap(i, ((u64::from(word) * (i as u64 + 1)) >> 32) as usize);
    }
}
