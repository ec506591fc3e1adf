//! One call by discrete events: the programs of its phases, in order, on all ranks, with the streams and events that the
//! programs say.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_cost::Machine;
use tessera_cost::bars::{Bar, Kind, Overlap, overlap};
use tessera_cost::program::{Doing, Price, Priced, span};
use tessera_cost::streams::{Contention, Task, TaskId, Tasks, Uses, Window};
use tessera_ir::{Bundle, Op, Opcode, Program, ValueId};
use tessera_mesh::{LinkClass, Rank};

use super::players::{Player, met, players};

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
    let players = players(bundle, &machine.cluster);
    // Power depends on what fills the call, so it is played once at full speed to see how busy it is.
    let free = play(bundle, &players, phases, machine, 1.0, false)?;
    let heavy: f64 =
        [Doing::Product, Doing::Attention].iter().filter_map(|d| busiest(&free.0.work).get(d).copied()).sum();
    let end = |windows: &[Window]| windows.iter().map(|w| w.end_ns).fold(0.0, f64::max);
    let pace = machine.profile.habits.pace(heavy / end(&free.1).max(f64::MIN_POSITIVE));
    let (cast, windows) =
        if pace < 1.0 || named { play(bundle, &players, phases, machine, pace, named)? } else { free };
    let at = |t: &TaskId| windows[t.0 as usize];
    let spans = cast.spans.iter().map(|(name, begin, end)| PhaseSpan {
        name: name.clone(),
        start_ns: begin.iter().map(|t| at(t).end_ns).fold(f64::INFINITY, f64::min).max(0.0),
        end_ns: end.iter().map(|t| at(t).end_ns).fold(0.0, f64::max),
    });
    let phases: Vec<PhaseSpan> = spans.collect();
    let bars: Vec<Bar> = cast
        .drawn
        .iter()
        .zip(&windows)
        .filter(|(d, w)| d.shown && w.end_ns > w.start_ns)
        .map(|(d, w)| Bar {
            rank: players[d.player].rank.0,
            lane: if named { d.lane.clone() } else { String::new() },
            name: d.name.clone(),
            kind: d.kind,
            start_ns: w.start_ns,
            end_ns: w.end_ns,
        })
        .collect();
    Ok(CallEstimate {
        call: call.to_string(),
        ns: end(&windows),
        pace,
        phases,
        overlap: over_ranks(&players, &bars),
        collective_ns: most(&players, |p| {
            bars.iter().filter(|b| b.rank == p.rank.0 && b.kind == Kind::Collective).map(Bar::ns).sum()
        }),
        bars,
        work_ns: busiest(&cast.work),
        sent: cast.sent,
        flops: cast.flops,
        players: players.clone(),
    })
}

/// The tasks of a call and when they ran.
fn play<'a>(
    bundle: &'a Bundle,
    players: &'a [Player],
    phases: &[String],
    machine: &'a Machine,
    pace: f64,
    named: bool,
) -> Result<(Cast<'a>, Vec<Window>), Box<Diagnostic>> {
    let mut cast = Cast::new(bundle, players, machine, pace);
    for name in phases {
        cast.phase(name, named);
    }
    let windows = cast
        .tasks
        .run(Contention { compute: machine.contention(), links: false })
        .map_err(|stuck| Box::new(stuck.diagnostic(|t| cast.drawn[t.0 as usize].name.clone())))?;
    Ok((cast, windows))
}

/// Overlap summed over all ranks, each with its player's.
fn over_ranks(players: &[Player], bars: &[Bar]) -> Overlap {
    players.iter().fold(Overlap::default(), |sum, p| {
        let own: Vec<Bar> = bars.iter().filter(|b| b.rank == p.rank.0).cloned().collect();
        let (one, n) = (overlap(&own, false), p.stands_for.len() as f64);
        Overlap { total_ns: sum.total_ns + n * one.total_ns, hidden_ns: sum.hidden_ns + n * one.hidden_ns }
    })
}

fn most(players: &[Player], of: impl Fn(&Player) -> f64) -> f64 {
    players.iter().map(of).fold(0.0, f64::max)
}

fn busiest(work: &[BTreeMap<Doing, f64>]) -> BTreeMap<Doing, f64> {
    let sum = |w: &BTreeMap<Doing, f64>| w.values().sum::<f64>();
    work.iter().max_by(|a, b| sum(a).total_cmp(&sum(b))).cloned().unwrap_or_default()
}

/// What a task is drawn as.
struct Drawn {
    player: usize,
    lane: String,
    name: String,
    kind: Kind,
    shown: bool,
}

/// Stream of a rank on which its host launches.
const HOST: u8 = u8::MAX;
/// Stream of a rank on which its phases join.
const JOIN: u8 = u8::MAX - 1;

/// Tasks of all players under construction.
struct Cast<'a> {
    bundle: &'a Bundle,
    players: &'a [Player],
    machine: &'a Machine,
    pace: f64,
    tasks: Tasks,
    drawn: Vec<Drawn>,
    /// Where each player's last phase ended.
    joined: Vec<Option<TaskId>>,
    /// Player that stands for each rank.
    player_of: BTreeMap<Rank, usize>,
    /// How many collectives of each kind of meeting each player has launched.
    launched: BTreeMap<(usize, Meeting), u32>,
    /// Numbers of meetings.
    meetings: BTreeMap<(Meeting, u32), u32>,
    /// Programs with their prices, by phase and role: a call runs some phases several times.
    priced: BTreeMap<(String, usize), Priced<'a>>,
    /// Begin and end marks of the players, by phase.
    spans: Vec<(String, Vec<TaskId>, Vec<TaskId>)>,
    work: Vec<BTreeMap<Doing, f64>>,
    sent: [f64; 3],
    flops: f64,
}

/// Who meets: the players concerned, in order, and for a send and its receive the direction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Of(String, Vec<usize>),
    FromTo(usize, usize),
}

/// One phase of one player under construction.
struct Part<'a> {
    player: usize,
    program: &'a Program,
    defs: Vec<Option<usize>>,
    begin: TaskId,
    /// Last task of each stream.
    last: BTreeMap<u8, TaskId>,
    /// Tasks behind events and tickets.
    behind: BTreeMap<ValueId, TaskId>,
    named: bool,
}

impl<'a> Cast<'a> {
    fn new(bundle: &'a Bundle, players: &'a [Player], machine: &'a Machine, pace: f64) -> Cast<'a> {
        let stands = |(i, p): (usize, &Player)| p.stands_for.iter().map(move |r| (*r, i)).collect::<Vec<_>>();
        Cast {
            bundle,
            players,
            machine,
            pace,
            tasks: Tasks::default(),
            drawn: Vec::new(),
            joined: vec![None; players.len()],
            player_of: players.iter().enumerate().flat_map(stands).collect(),
            launched: BTreeMap::new(),
            meetings: BTreeMap::new(),
            priced: BTreeMap::new(),
            spans: Vec::new(),
            work: vec![BTreeMap::new(); players.len()],
            sent: [0.0; 3],
            flops: 0.0,
        }
    }

    fn phase(&mut self, name: &str, named: bool) {
        let bundle = self.bundle;
        let Some(phase) = bundle.phase(name) else { return };
        let (mut begins, mut ends) = (Vec::new(), Vec::new());
        for (i, player) in self.players.iter().enumerate() {
            let program = &phase.programs[player.role];
            let key = (name.to_string(), player.role);
            let priced =
                self.priced.remove(&key).unwrap_or_else(|| Priced::of(self.machine, program, self.pace));
            let begin = self.mark(i, self.joined[i]);
            let mut part = Part {
                player: i,
                program,
                defs: program.definitions(),
                begin,
                last: BTreeMap::new(),
                behind: BTreeMap::new(),
                named,
            };
            for (at, (op, price)) in program.ops.iter().zip(&priced.ops).enumerate() {
                self.op(&mut part, &priced, (at, op), price);
            }
            self.priced.insert(key, priced);
            let end = self.mark(i, Some(begin));
            for last in part.last.values() {
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
        let drawn =
            Drawn { player, lane: String::new(), name: String::new(), kind: Kind::Other, shown: false };
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

    fn op(&mut self, part: &mut Part<'_>, priced: &Priced, (at, op): (usize, &Op), price: &Price) {
        let stream = op.stream.0 as u8;
        let people = self.players[part.player].stands_for.len() as f64;
        self.flops += price.flops * people;
        if price.ns > 0.0 {
            *self.work[part.player].entry(price.doing).or_insert(0.0) += price.ns;
        }
        let mut after: Vec<TaskId> = op.after.iter().filter_map(|e| part.behind.get(e)).copied().collect();
        let host = self.machine.launch_ns() * f64::from(price.launches);
        if host > 0.0 {
            let launch = self.push(part.drawn(op, Kind::Other, "host"), HOST, host, Uses::Nothing, None);
            self.order(part, HOST, launch, &[]);
            after.push(launch);
        }
        match op.opcode {
            Opcode::EventRecord => {
                let point = part.last.get(&stream).copied().unwrap_or(part.begin);
                part.behind.extend(op.results.iter().map(|r| (*r, point)));
            }
            Opcode::Wait => {
                let ticket = op.operands.first().and_then(|t| part.behind.get(t)).copied();
                after.extend(ticket);
                let uses = if price.ns > 0.0 { Uses::Compute } else { Uses::Nothing };
                self.step(part, op, stream, Kind::Pack, price.ns, uses, &after);
            }
            _ if op.opcode.is_collective() => {
                if price.ns > 0.0 {
                    self.step(part, op, stream, Kind::Pack, price.ns, Uses::Compute, &after);
                    after.clear();
                }
                self.collective(part, priced, (at, op), &after);
            }
            _ if price.ns > 0.0 || !after.is_empty() => {
                self.step(part, op, stream, Kind::Compute, price.ns, Uses::Compute, &after);
            }
            _ => {}
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one task has as many facts")]
    fn step(
        &mut self,
        part: &mut Part<'_>,
        op: &Op,
        stream: u8,
        kind: Kind,
        ns: f64,
        uses: Uses,
        after: &[TaskId],
    ) {
        let lane = part.program.streams.get(usize::from(stream)).map_or("", String::as_str);
        let task = self.push(part.drawn(op, kind, lane), stream, ns, uses, None);
        self.order(part, stream, task, after);
    }

    fn collective(&mut self, part: &mut Part<'_>, priced: &Priced, (at, op): (usize, &Op), after: &[TaskId]) {
        let player = &self.players[part.player];
        let (stream, people) = (op.stream.0 as u8, player.stands_for.len() as f64);
        let others = met(self.bundle, player.rank, op);
        let span = span(&self.machine.cluster, &self.bundle.mesh, player.rank, op);
        let Some(transfer) = priced.exchange(at, span) else { return };
        for (sum, sent) in self.sent.iter_mut().zip(transfer.sent) {
            *sum += sent * people;
        }
        let meets = (others.len() > 1).then(|| self.meeting(part.player, op, &others));
        let class = if span.domains > 1 { LinkClass::Out } else { LinkClass::Domain };
        let lane = part.program.streams.get(usize::from(stream)).map_or("", String::as_str);
        let drawn = part.drawn(op, Kind::Collective, lane);
        let task = self.push(drawn, stream, transfer.ns, Uses::Link(class), meets);
        self.order(part, stream, task, after);
        if op.issue {
            part.behind.extend(op.results.iter().map(|r| (*r, task)));
        }
    }

    /// The number of a meeting: the how many-th of its kind the player comes to.
    fn meeting(&mut self, player: usize, op: &Op, others: &[Rank]) -> u32 {
        let of = |r: &Rank| self.player_of.get(r).copied().unwrap_or(player);
        let kind = match op.opcode {
            Opcode::Send => Meeting::FromTo(player, of(&others[1])),
            Opcode::Recv => Meeting::FromTo(of(&others[1]), player),
            _ => {
                let mut all: Vec<usize> = others.iter().map(of).collect();
                all.sort_unstable();
                all.dedup();
                Meeting::Of(op.group().map_or_else(String::new, |g| g.to_string()), all)
            }
        };
        let count = self.launched.entry((player, kind.clone())).or_insert(0);
        *count += 1;
        let (at, next) = (*count, self.meetings.len() as u32);
        *self.meetings.entry((kind, at)).or_insert(next)
    }

    /// Puts a task behind its phase's begin, if it is its stream's first, and behind what it comes after.
    fn order(&mut self, part: &mut Part<'_>, stream: u8, task: TaskId, after: &[TaskId]) {
        if part.last.insert(stream, task).is_none() {
            self.tasks.after(task, part.begin);
        }
        for earlier in after {
            self.tasks.after(task, *earlier);
        }
    }
}

impl Part<'_> {
    fn drawn(&self, op: &Op, kind: Kind, lane: &str) -> Drawn {
        let (lane, name) =
            if self.named { (lane.to_string(), self.what(op)) } else { (String::new(), String::new()) };
        Drawn { player: self.player, lane, name, kind, shown: true }
    }

    /// What an op is called on a chart: its name and what it works with.
    fn what(&self, op: &Op) -> String {
        let p = self.program;
        let maker = |v: &ValueId| self.defs[v.0 as usize].map(|d| &p.ops[d]);
        let weight = op.operands.iter().filter_map(maker).find(|o| o.opcode == Opcode::Weight);
        let buffer = op.buffer.or_else(|| op.operands.get(1).and_then(maker)?.buffer);
        let verb = op.opcode.name();
        match (weight.and_then(|w| w.name.as_deref()), buffer) {
            (Some(w), _) => format!("{verb} {}", w.trim_end_matches(".weight")),
            (None, Some(b)) => format!("{verb} {}", p.buffer(b).name),
            (None, None) => verb.to_string(),
        }
    }
}
