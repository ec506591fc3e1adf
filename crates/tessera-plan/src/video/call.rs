//! One call by discrete events: the programs of its phases, in order, on all ranks, with the streams and events that the
//! programs say.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_cost::bars::{Bar, Kind, Overlap, overlap};
use tessera_cost::program::{Doing, Price, span_of};
use tessera_cost::streams::{Contention, Task, TaskId, Tasks, Uses, Window};
use tessera_cost::{CollectiveOp, Machine, Span, Transfer};
use tessera_ir::Bundle;
use tessera_mesh::{Group, LinkClass, Rank};

use super::players::{Player, players_of};
use super::score::{Called, Does, Movement, Score, Step, Way, Whom};

/// What one call comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct CallEstimate {
    /// Its name.
    pub call: String,
    /// From the first start to the last end, over all ranks.
    pub ns: f64,
    /// Its phases in order.
    pub phases: Vec<PhaseSpan>,
    /// The ranks that were followed.
    pub players: Vec<Player>,
    /// What ran on the streams of the players; without names unless they were asked for.
    pub bars: Vec<Bar>,
    /// Of each bar, the index of its op in its phase's program; none without names.
    pub ops: Vec<usize>,
    /// Collective time of all ranks, and how much of it computing hides.
    pub overlap: Overlap,
    /// Device time of the busiest rank by what it does, in nanoseconds, without contention.
    pub work_ns: BTreeMap<Doing, f64>,
    /// Time of the collectives of the rank that has most of it, in nanoseconds.
    pub collective_ns: f64,
    /// Bytes that all ranks together send, by link class.
    pub sent: [f64; 3],
    /// Floating-point operations of all ranks.
    pub flops: f64,
    /// Share of full speed at which products and attention run.
    pub pace: f64,
}

/// When a phase ran.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseSpan {
    /// Its name.
    pub name: String,
    /// When the first rank began it.
    pub start_ns: f64,
    /// When the last rank ended it.
    pub end_ns: f64,
}

impl CallEstimate {
    /// Collective time that nothing hides, per rank on the mean, in nanoseconds.
    #[must_use]
    pub fn exposed_ns(&self) -> f64 {
        let ranks: usize = self.players.iter().map(|p| p.stands_for.len()).sum();
        self.overlap.exposed_ns() / ranks.max(1) as f64
    }

    /// What each of the `ops` ops of a rank's program takes, in nanoseconds, in a call of one phase with names: of an exchange also
    /// what is done on the device for it.
    #[must_use]
    pub fn ops_ns(&self, rank: Rank, ops: usize) -> Vec<f64> {
        let mut out = vec![0.0; ops];
        let player = self.players.iter().find(|p| p.stands_for.contains(&rank));
        let own = |b: &Bar| player.is_some_and(|p| p.rank.0 == b.rank) && b.kind != Kind::Other;
        for (bar, op) in self.bars.iter().zip(&self.ops).filter(|(b, _)| own(b)) {
            if let Some(ns) = out.get_mut(*op) {
                *ns += bar.ns();
            }
        }
        out
    }

    /// The bars of every rank: those of its player.
    #[must_use]
    pub fn expand(&self) -> Vec<Bar> {
        let mut out = Vec::new();
        for player in &self.players {
            let own: Vec<&Bar> = self.bars.iter().filter(|b| b.rank == player.rank.0).collect();
            for rank in &player.stands_for {
                out.extend(own.iter().map(|b| Bar { rank: rank.0, ..(*b).clone() }));
            }
        }
        out
    }
}

/// Estimates a call of a bundle. `named` gives each bar its lane and name; a search does without.
///
/// # Errors
/// T1115 when ranks wait for each other in a circle, as no sealed plan does.
pub fn estimate_call(
    bundle: &Bundle,
    call: &str,
    phases: &[String],
    machine: &Machine,
    named: bool,
) -> Result<CallEstimate, Box<Diagnostic>> {
    play(&Score::of(bundle, machine, named), call, phases, machine)
}

/// Plays a call of a score.
///
/// # Errors
/// T1115.
pub(super) fn play(
    score: &Score,
    call: &str,
    phases: &[String],
    machine: &Machine,
) -> Result<CallEstimate, Box<Diagnostic>> {
    let players = players_of(score, &machine.cluster);
    let mut cast = Cast::new(score, &players, machine);
    cast.reserve(phases);
    for name in phases {
        cast.phase(name);
    }
    let run = |cast: &Cast<'_>| {
        let contention = Contention { compute: machine.contention(), links: false };
        cast.tasks
            .run(contention)
            .map_err(|stuck| Box::new(stuck.diagnostic(|t| cast.said(t).map_or("", |s| &s.name).to_string())))
    };
    // Power depends on what fills the call, so it is played once at full speed to see how busy it is.
    let mut windows = run(&cast)?;
    let end = |windows: &[Window]| windows.iter().map(|w| w.end_ns).fold(0.0, f64::max);
    let busy = busiest(&cast.work, 1.0);
    let heavy: f64 = [Doing::Product, Doing::Attention].iter().filter_map(|d| busy.get(d)).sum();
    let pace = machine.profile.habits.pace(heavy / end(&windows).max(f64::MIN_POSITIVE));
    if pace < 1.0 {
        cast.pace(pace);
        windows = run(&cast)?;
    }
    let at = |t: &TaskId| windows[t.0 as usize];
    let spans = cast.spans.iter().map(|(name, begin, end)| PhaseSpan {
        name: name.clone(),
        start_ns: begin.iter().map(|t| at(t).end_ns).fold(f64::INFINITY, f64::min).max(0.0),
        end_ns: end.iter().map(|t| at(t).end_ns).fold(0.0, f64::max),
    });
    let phases: Vec<PhaseSpan> = spans.collect();
    // By player, so that each has its own in one piece.
    let mut bars: Vec<Vec<Bar>> = vec![Vec::new(); players.len()];
    let mut ops: Vec<Vec<usize>> = vec![Vec::new(); players.len()];
    for (i, (drawn, w)) in cast.drawn.iter().zip(&windows).enumerate() {
        if drawn.step.is_some() && w.end_ns > w.start_ns {
            let said = cast.said(TaskId(i as u32));
            let lane = said.map_or("", |s| if drawn.launch { "host" } else { &s.lane });
            ops[drawn.player].extend(said.map(|s| s.op));
            bars[drawn.player].push(Bar {
                rank: players[drawn.player].rank.0,
                lane: lane.to_string(),
                name: said.map_or("", |s| &s.name).to_string(),
                kind: drawn.kind,
                start_ns: w.start_ns,
                end_ns: w.end_ns,
            });
        }
    }
    let exchanging = |own: &Vec<Bar>| own.iter().filter(|b| b.kind == Kind::Collective).map(Bar::ns).sum();
    Ok(CallEstimate {
        call: call.to_string(),
        ns: end(&windows),
        pace,
        phases,
        overlap: over_ranks(&players, &bars),
        collective_ns: bars.iter().map(exchanging).fold(0.0, f64::max),
        bars: bars.into_iter().flatten().collect(),
        ops: ops.into_iter().flatten().collect(),
        work_ns: busiest(&cast.work, pace),
        sent: cast.sent,
        flops: cast.flops,
        players,
    })
}

/// Overlap summed over all ranks, each with its player's.
fn over_ranks(players: &[Player], bars: &[Vec<Bar>]) -> Overlap {
    players.iter().zip(bars).fold(Overlap::default(), |sum, (p, own)| {
        let (one, n) = (overlap(own, false), p.stands_for.len() as f64);
        Overlap { total_ns: sum.total_ns + n * one.total_ns, hidden_ns: sum.hidden_ns + n * one.hidden_ns }
    })
}

/// Device time of a player by what it does, and the part of it that pace stretches.
type Work = BTreeMap<Doing, (f64, f64)>;

/// The work of the player that has most.
fn busiest(work: &[Work], pace: f64) -> BTreeMap<Doing, f64> {
    let at = |(ns, paced): &(f64, f64)| paced / pace + (ns - paced);
    let sum = |w: &Work| w.values().map(at).sum::<f64>();
    let most = work.iter().max_by(|a, b| sum(a).total_cmp(&sum(b)));
    most.map_or_else(BTreeMap::new, |w| w.iter().map(|(d, x)| (*d, at(x))).collect())
}

/// What a task is drawn as.
struct Drawn {
    player: usize,
    kind: Kind,
    /// Phase of the score and step of the player's part in it; none for a mark, which is not drawn.
    step: Option<(usize, usize)>,
    /// Whether it is the host's launch of the step.
    launch: bool,
}

/// Stream of a rank on which its host launches.
const HOST: u8 = u8::MAX;
/// Stream of a rank on which its phases join.
const JOIN: u8 = u8::MAX - 1;

/// Tasks of all players under construction.
struct Cast<'a> {
    score: &'a Score,
    players: &'a [Player],
    machine: &'a Machine,
    tasks: Tasks,
    drawn: Vec<Drawn>,
    /// Where each player's last phase ended.
    joined: Vec<Option<TaskId>>,
    /// Player that stands for each rank.
    player_of: BTreeMap<Rank, usize>,
    /// Whom each player meets.
    doors: Vec<Vec<(Whom, Door)>>,
    /// How often each player came to each kind of meeting: several of whom it meets may be one kind.
    came: Vec<Vec<usize>>,
    /// Kinds of meetings.
    meetings: BTreeMap<Meeting, u32>,
    /// Number of each meeting, by kind.
    numbers: Vec<Vec<u32>>,
    /// Meetings so far.
    met: u32,
    /// What was priced already.
    transfers: Vec<((CollectiveOp, u64, Span), Transfer)>,
    /// Tasks whose work depends on the pace.
    paced: Vec<(TaskId, Price)>,
    /// Begin and end marks of the players, by phase.
    spans: Vec<(String, Vec<TaskId>, Vec<TaskId>)>,
    work: Vec<Work>,
    sent: [f64; 3],
    flops: f64,
}

/// Who meets: the players concerned, in order, and for a send and its receive the direction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Of(Option<Group>, Vec<usize>),
    FromTo(usize, usize),
}

/// A meeting as a player comes to it again and again.
#[derive(Debug, Clone, Copy)]
struct Door {
    span: Span,
    /// Its kind; none where nobody else comes.
    kind: Option<u32>,
}

/// One phase of one player under construction.
struct Now {
    player: usize,
    phase: usize,
    begin: TaskId,
    /// Last task of each stream.
    last: Vec<(u8, TaskId)>,
    /// Tasks behind the steps so far: of points and exchanges.
    behind: Vec<Option<TaskId>>,
}

impl<'a> Cast<'a> {
    fn new(score: &'a Score, players: &'a [Player], machine: &'a Machine) -> Cast<'a> {
        let stands = |(i, p): (usize, &Player)| p.stands_for.iter().map(move |r| (*r, i)).collect::<Vec<_>>();
        Cast {
            score,
            players,
            machine,
            tasks: Tasks::default(),
            drawn: Vec::new(),
            joined: vec![None; players.len()],
            player_of: players.iter().enumerate().flat_map(stands).collect(),
            doors: vec![Vec::new(); players.len()],
            came: vec![Vec::new(); players.len()],
            meetings: BTreeMap::new(),
            numbers: Vec::new(),
            met: 0,
            transfers: Vec::new(),
            paced: Vec::new(),
            spans: Vec::new(),
            work: vec![BTreeMap::new(); players.len()],
            sent: [0.0; 3],
            flops: 0.0,
        }
    }

    /// Makes room for a call's tasks.
    fn reserve(&mut self, phases: &[String]) {
        let found = phases.iter().filter_map(|name| self.score.phase(name)).map(|at| &self.score.phases[at]);
        let steps =
            |phase: &Movement| -> usize { self.players.iter().map(|p| phase.parts[p.role].len()).sum() };
        let tasks = found.map(steps).sum();
        self.tasks.reserve(tasks);
        self.drawn.reserve(tasks);
    }

    fn phase(&mut self, name: &str) {
        let score = self.score;
        let Some(phase) = score.phase(name) else { return };
        let (mut begins, mut ends) = (Vec::new(), Vec::new());
        for (i, player) in self.players.iter().enumerate() {
            let part = &score.phases[phase].parts[player.role];
            let begin = self.mark(i, self.joined[i]);
            let mut now = Now { player: i, phase, begin, last: Vec::new(), behind: Vec::new() };
            for at in part.order() {
                self.step(&mut now, at, &part.steps[at]);
            }
            let end = self.mark(i, Some(begin));
            for (_, last) in &now.last {
                self.tasks.after(end, *last);
            }
            self.joined[i] = Some(end);
            begins.push(begin);
            ends.push(end);
        }
        self.spans.push((name.to_string(), begins, ends));
    }

    /// A point in a player's time.
    fn mark(&mut self, player: usize, after: Option<TaskId>) -> TaskId {
        let drawn = Drawn { player, kind: Kind::Other, step: None, launch: false };
        let task = self.push(drawn, JOIN, 0.0, Uses::Nothing, None);
        if let Some(after) = after {
            self.tasks.after(task, after);
        }
        task
    }

    fn push(&mut self, drawn: Drawn, stream: u8, work_ns: f64, uses: Uses, meets: Option<u32>) -> TaskId {
        let rank = self.players[drawn.player].rank.0;
        self.drawn.push(drawn);
        self.tasks.push(Task { rank, stream, work_ns, uses, meets })
    }

    fn step(&mut self, now: &mut Now, at: usize, step: &Step) {
        let price = &step.price;
        let people = self.players[now.player].stands_for.len() as f64;
        self.flops += price.flops * people;
        if price.ns > 0.0 {
            let work = self.work[now.player].entry(price.doing).or_insert((0.0, 0.0));
            (work.0, work.1) = (work.0 + price.ns, work.1 + price.paced_ns);
        }
        let here = now.behind.len();
        let earlier = |back: &u32| now.behind.get(here - *back as usize).copied().flatten();
        let mut after: Vec<TaskId> = step.after.iter().filter_map(earlier).collect();
        let host = self.machine.launch_ns() * f64::from(price.launches);
        if host > 0.0 {
            let drawn =
                Drawn { player: now.player, kind: Kind::Other, step: Some((now.phase, at)), launch: true };
            let launch = self.push(drawn, HOST, host, Uses::Nothing, None);
            self.order(now, HOST, launch, &[]);
            after.push(launch);
        }
        let works = price.ns > 0.0;
        let behind = match step.does {
            Does::Point => {
                let last = now.last.iter().find(|(s, _)| *s == step.stream);
                Some(last.map_or(now.begin, |(_, t)| *t))
            }
            Does::Take => {
                let uses = if works { Uses::Compute } else { Uses::Nothing };
                self.work(now, (at, step), Kind::Pack, uses, &after);
                None
            }
            Does::Exchange { whom, what, bytes, issue } => {
                if works {
                    self.work(now, (at, step), Kind::Pack, Uses::Compute, &after);
                    after.clear();
                }
                let task = self.exchange(now, (at, step), whom, (what, bytes), &after);
                issue.then_some(task)
            }
            Does::Work => {
                if works || !after.is_empty() {
                    self.work(now, (at, step), Kind::Compute, Uses::Compute, &after);
                }
                None
            }
        };
        now.behind.push(behind);
    }

    /// What a step does on its own device.
    fn work(&mut self, now: &mut Now, (at, step): (usize, &Step), kind: Kind, uses: Uses, after: &[TaskId]) {
        let drawn = Drawn { player: now.player, kind, step: Some((now.phase, at)), launch: false };
        let task = self.push(drawn, step.stream, step.price.ns, uses, None);
        if step.price.paced_ns > 0.0 {
            self.paced.push((task, step.price));
        }
        self.order(now, step.stream, task, after);
    }

    fn exchange(
        &mut self,
        now: &mut Now,
        (at, step): (usize, &Step),
        whom: Whom,
        (what, bytes): (CollectiveOp, f64),
        after: &[TaskId],
    ) -> TaskId {
        let people = self.players[now.player].stands_for.len() as f64;
        let (span, meets) = self.come(now.player, whom);
        let transfer = self.transfer(what, bytes, span);
        if !matches!(whom.way, Way::From(_)) {
            for (sum, sent) in self.sent.iter_mut().zip(transfer.sent) {
                *sum += sent * people;
            }
        }
        let class = if span.domains > 1 { LinkClass::Out } else { LinkClass::Domain };
        let drawn =
            Drawn { player: now.player, kind: Kind::Collective, step: Some((now.phase, at)), launch: false };
        let task = self.push(drawn, step.stream, transfer.ns, Uses::Link(class), meets);
        self.order(now, step.stream, task, after);
        task
    }

    fn transfer(&mut self, what: CollectiveOp, bytes: f64, span: Span) -> Transfer {
        let key = (what, bytes.to_bits(), span);
        if let Some((_, known)) = self.transfers.iter().find(|(k, _)| *k == key) {
            return *known;
        }
        let transfer = self.machine.collective(what, bytes, span);
        self.transfers.push((key, transfer));
        transfer
    }

    /// The span of a meeting that a player comes to, and its number if others come too: the how many-th of its kind it is
    /// to the player.
    fn come(&mut self, player: usize, whom: Whom) -> (Span, Option<u32>) {
        let at = match self.doors[player].iter().position(|(w, _)| *w == whom) {
            Some(at) => at,
            None => {
                let door = self.door(player, whom);
                self.doors[player].push((whom, door));
                self.doors[player].len() - 1
            }
        };
        let door = self.doors[player][at].1;
        let Some(kind) = door.kind.map(|k| k as usize) else { return (door.span, None) };
        let came = &mut self.came[player];
        came.resize(came.len().max(kind + 1), 0);
        let nth = came[kind];
        came[kind] += 1;
        let numbers = &mut self.numbers[kind];
        if numbers.len() <= nth {
            numbers.push(self.met);
            self.met += 1;
        }
        (door.span, Some(numbers[nth]))
    }

    fn door(&mut self, player: usize, whom: Whom) -> Door {
        let others = whom.met(&self.score.mesh, self.players[player].rank);
        let of = |r: &Rank| self.player_of.get(r).copied().unwrap_or(player);
        let kind = (others.len() > 1).then(|| match whom.way {
            Way::To(_) => Meeting::FromTo(player, of(&others[1])),
            Way::From(_) => Meeting::FromTo(of(&others[1]), player),
            Way::All => {
                let mut all: Vec<usize> = others.iter().map(of).collect();
                all.sort_unstable();
                all.dedup();
                Meeting::Of(whom.group, all)
            }
        });
        let kind = kind.map(|kind| {
            let next = self.meetings.len() as u32;
            *self.meetings.entry(kind).or_insert(next)
        });
        self.numbers.resize(self.meetings.len(), Vec::new());
        Door { span: span_of(&self.machine.cluster, &others), kind }
    }

    /// Puts a task behind its phase's begin, if it is its stream's first, and behind what it comes after.
    fn order(&mut self, now: &mut Now, stream: u8, task: TaskId, after: &[TaskId]) {
        match now.last.iter_mut().find(|(s, _)| *s == stream) {
            Some((_, last)) => *last = task,
            None => {
                now.last.push((stream, task));
                self.tasks.after(task, now.begin);
            }
        }
        for earlier in after {
            self.tasks.after(task, *earlier);
        }
    }

    /// Gives products and attention the time they take at a share of full speed.
    fn pace(&mut self, pace: f64) {
        for (task, price) in &self.paced {
            self.tasks.set_work(*task, price.at(pace));
        }
    }

    /// What a task is called, if its score has names.
    fn said(&self, task: TaskId) -> Option<&'a Called> {
        let drawn = &self.drawn[task.0 as usize];
        let (phase, step) = drawn.step?;
        let part = &self.score.phases[phase].parts[self.players[drawn.player].role];
        part.names.as_ref().map(|names| &names[step])
    }
}
