//! Where collectives meet: a group for each lane, the moves that ops mean, and faults in the words of ranks and ops.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;

use tessera_device::{Abort, Fault, Observer, Route, Seat, agreed, as_matrix, pieces};
use tessera_ir::{Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, Reduction};

use super::{Carried, Cuda, End, Options, Place};
use crate::compile::Compiler;
use crate::driver::{Done, Failed, Memory, Stream, failed};
use crate::exchange::{Aborter, Along, Group, GroupFault, Kind, Move, Targets, Terms, Via, Way};
use crate::libraries::Libraries;

/// All lanes of a rank.
#[derive(Debug)]
pub(super) struct Groups {
    ends: Vec<Lane>,
    seat: Seat,
}

#[derive(Debug)]
struct Lane {
    route: Route,
    group: Group,
    /// Of each program and op: where every member's operand and result lie in its exchange memory.
    offsets: BTreeMap<(usize, usize), (Vec<u64>, Vec<u64>)>,
}

/// Blocks of a transfer's kernel: as many as fill the links (32 reach 220 GB/s of 16 MiB pieces, 8 half of that).
const BLOCKS: u32 = 32;

/// Bytes of exchange memory are whole pages of this size, as sharing wants them.
pub(super) const PAGE_BYTES: usize = 2 << 20;

/// How long NCCL may take to end.
const ENDING: Duration = Duration::from_secs(2);

/// What stands where a member brings or gets nothing.
const NOWHERE: u64 = u64::MAX;

impl Groups {
    /// Meets the members of every lane in turn.
    pub(super) fn join(
        libraries: &Libraries,
        compiler: &mut Compiler,
        seat: Seat,
        ends: Vec<End>,
        options: &Options,
    ) -> Done<Groups> {
        let abort = Arc::new(AtomicBool::new(false));
        let terms = Terms {
            way: Way::Best,
            blocks: BLOCKS,
            patience: options.patience,
            setup: options.setup,
            host: options.host,
            staging_bytes: [0; 2],
        };
        let mut out = Vec::new();
        for e in ends {
            let group = Group::join(libraries, compiler, &e.id, (e.me, e.members), terms, Arc::clone(&abort))
                .map_err(|why| Failed(format!("lane {}: {why}", e.route)))?;
            out.push(Lane { route: e.route, group, offsets: BTreeMap::new() });
        }
        Ok(Groups { ends: out, seat })
    }

    /// How ranks meet in each lane, in words.
    pub(super) fn ways(&self) -> Vec<String> {
        let way = |e: &Lane| match e.group.why_not_peers() {
            None => format!("{}: over peers' memory", e.route),
            Some(why) => format!("{}: through NCCL, since {why}", e.route),
        };
        self.ends.iter().map(way).collect()
    }

    /// Whether something goes through NCCL, which connects at the first use of each verb and then may be captured.
    pub(super) fn lazy(&self) -> bool {
        self.ends.iter().any(|e| e.group.uses_nccl())
    }

    pub(super) fn rewind(&self) {
        self.ends.iter().for_each(|e| e.group.rewind());
    }

    /// Ends what is under way on all lanes. It has ended, or the time for it is over, when all threads have. NCCL ends no lane while a
    /// graph that holds work of it lives: such graphs go before anybody waits for the threads.
    pub(super) fn end(&self) -> Vec<JoinHandle<()>> {
        end(&self.aborters())
    }

    fn aborters(&self) -> Vec<Aborter> {
        self.ends.iter().map(|e| e.group.aborter()).collect()
    }

    pub(super) fn abort(&self) -> Abort {
        let aborters = self.aborters();
        // Whoever aborts has to leave in time and waits for no library: threads are left to themselves.
        Arc::new(move |_| drop(end(&aborters)))
    }

    /// What went wrong on the device, in words.
    pub(super) fn fault(&self, p: &Program) -> Option<Fault> {
        self.ends.iter().find_map(|e| {
            let fault = e.group.fault()?;
            let lane = e.route.lane(&self.seat.mesh, self.seat.rank);
            let rank = |member: usize| match lane.as_ref().and_then(|l| l.members.get(member)) {
                Some(r) => format!("rank {r}"),
                None => format!("member {member}"),
            };
            let at = |op: u32| {
                let name = p.ops.get(op as usize).map_or("?", |o| o.opcode.name());
                format!("{name} over {} in @{} (op {op})", e.route, p.name)
            };
            Some(match &fault {
                GroupFault::Mismatch { op, peer, mine, theirs } => Fault::Failed(format!(
                    "{}: {} brings another collective ({theirs:#010x}, this rank {mine:#010x})",
                    at(*op),
                    rank(*peer)
                )),
                GroupFault::Timeout { op, peers, .. } => {
                    let who: Vec<String> = peers.iter().map(|m| rank(*m)).collect();
                    Fault::Stalled(format!("{}: {} did not come in time", at(*op), who.join(", ")))
                }
                GroupFault::Aborted { op } => Fault::Aborted(format!("{}: ended", at(*op))),
                // The cause is another rank's, which will be heard of.
                GroupFault::Remote(why) => {
                    Fault::Aborted(format!("NCCL over {} in @{}: {why}", e.route, p.name))
                }
                GroupFault::Nccl(why) => {
                    Fault::Failed(format!("NCCL over {} in @{}: {why}", e.route, p.name))
                }
            })
        })
    }

    /// Ops of this program that the device has reached, and those that it has ended: by lane, the last of each.
    pub(super) fn reached(&self) -> Vec<(Route, Option<u32>, Option<u32>)> {
        self.ends
            .iter()
            .map(|e| {
                let progress = e.group.progress();
                (e.route, progress.arrived, progress.done)
            })
            .collect()
    }

    fn of(&self, op: &Op) -> Done<usize> {
        let route = Route::of(op);
        let found = self.ends.iter().position(|e| Some(e.route) == route);
        found.ok_or_else(|| Failed(format!("no communicator for {} {:?}", op.opcode.name(), op.attrs)))
    }
}

impl Cuda {
    /// Makes exchange memory visible to the other members of every lane, and exchanges where operands and results lie.
    pub(super) fn share(&mut self, memory: &Memory, offsets: &[u64]) -> Done<()> {
        let mut groups = std::mem::replace(&mut self.groups, Groups { ends: Vec::new(), seat: self.seat });
        let done = self.share_in(&mut groups, memory, offsets);
        self.groups = groups;
        done
    }

    fn share_in(&self, groups: &mut Groups, memory: &Memory, offsets: &[u64]) -> Done<()> {
        let mut wanted: Vec<Vec<(usize, usize, u64, u64)>> = vec![Vec::new(); groups.ends.len()];
        for (program, prepared) in self.programs.iter().enumerate() {
            let p = &prepared.program;
            let slot = |v: Option<ValueId>| match v.map(|v| prepared.places[v.0 as usize]) {
                Some(Place::Slot(s)) => offsets[s],
                _ => NOWHERE,
            };
            for (i, op) in p.collectives() {
                let Some(lane) = groups.ends.iter().position(|e| Some(e.route) == Route::of(op)) else {
                    return failed(format!("no communicator for {} of @{}", op.opcode.name(), p.name));
                };
                let (operand, result) = (slot(op.operands.first().copied()), slot(p.given(op)));
                wanted[lane].push((program, i, operand, result));
                let m = self.movement(p, i)?;
                groups.ends[lane].group.stage(&m);
            }
        }
        for (lane, wanted) in groups.ends.iter_mut().zip(wanted) {
            lane.group.share(memory)?;
            if lane.route.peer.is_some() {
                lane.group.connect()?;
            }
            let mine: Vec<u64> = wanted.iter().flat_map(|(_, _, a, b)| [*a, *b]).collect();
            let all = lane.group.table(&mine)?;
            lane.offsets.clear();
            for (k, (program, op, ..)) in wanted.iter().enumerate() {
                let of =
                    |at: usize| all.iter().map(|w| w.get(2 * k + at).copied().unwrap_or(NOWHERE)).collect();
                lane.offsets.insert((*program, *op), (of(0), of(1)));
            }
        }
        Ok(())
    }

    /// Enqueues a collective whole.
    pub(super) fn exchange(&mut self, program: usize, i: usize, stream: &Stream) -> Done<()> {
        let (m, lane) = self.located(program, i)?;
        let by_engines =
            self.programs[program].carried.get(&i) == Some(&Carried::Engines) && m.worth_engines();
        let group = &mut self.groups.ends[lane].group;
        if !by_engines || group.way() != Way::Peers {
            return group.issue(&m, stream);
        }
        group.open(&m, stream)?;
        group.carry(&m, stream)?;
        group.close(&m, stream)
    }

    /// Enqueues the first half of a collective whose pieces their maker writes.
    pub(super) fn exchange_opens(&self, program: usize, i: usize, stream: &Stream) -> Done<()> {
        let (m, lane) = self.located(program, i)?;
        self.groups.ends[lane].group.open(&m, stream)
    }

    /// Enqueues its second half.
    pub(super) fn exchange_closes(&self, program: usize, i: usize, stream: &Stream) -> Done<()> {
        let (m, lane) = self.located(program, i)?;
        self.groups.ends[lane].group.close(&m, stream)
    }

    /// Where the maker of a collective's operand writes it; none where it cannot.
    pub(super) fn targets(&self, program: usize, i: usize, along: Along) -> Done<Option<Targets>> {
        let (m, lane) = self.located(program, i)?;
        self.groups.ends[lane].group.targets(&m, along)
    }

    /// A collective with its addresses, and its lane.
    fn located(&self, program: usize, i: usize) -> Done<(Move, usize)> {
        let p = Arc::clone(&self.programs[program].program);
        let op = &p.ops[i];
        let mut m = self.movement(&p, i)?;
        m.operand = op.operands.first().map_or(Ok(0), |v| self.at(program, *v))?;
        m.result = p.given(op).map_or(Ok(0), |v| self.at(program, v))?;
        let lane = self.groups.of(op)?;
        if let Some((operands, results)) = self.groups.ends[lane].offsets.get(&(program, i)) {
            (m.peers_operand, m.peers_result) = (operands.clone(), results.clone());
        }
        Ok((m, lane))
    }

    /// What a collective moves, without addresses.
    fn movement(&self, p: &Program, i: usize) -> Done<Move> {
        let op = &p.ops[i];
        let Some(route) = Route::of(op) else { return failed("a collective without a group") };
        let lane = route.lane(&self.seat.mesh, self.seat.rank);
        let members = lane.map_or(1, |l| l.members.len());
        let me = member(route, &self.seat);
        let operand = op.operands.first().map(|v| p.ty(*v));
        let out = p.given(op).map(|v| p.ty(v));
        let Some(ty) = operand.or(out) else { return failed("a collective of nothing") };
        let element = ty.dtype.bytes() as usize;
        let axis = op.axis().unwrap_or(Axis::Tp);
        let pieces = |ty: &Type| pieces(ty, axis, members as u32);
        let reduction = op.reduction().unwrap_or(Reduction::Sum);
        let kind = match (op.opcode, operand, out) {
            (Opcode::AllReduce, Some(x), _) => Kind::AllReduce { elements: x.elements() as usize, reduction },
            (Opcode::AllGather, Some(x), Some(y)) => {
                let (dim, parts) = pieces(x);
                Kind::all_gather(me, as_matrix(&y.shape, dim), dim.min(1), &parts, element)
            }
            (Opcode::ReduceScatter, Some(x), Some(y)) => {
                let (dim, parts) = pieces(y);
                let (rows, columns) = as_matrix(&x.shape, dim);
                Kind::ReduceScatter { rows, columns, dim: dim.min(1), parts, reduction }
            }
            (Opcode::AllToAll, Some(x), Some(y)) => {
                let ((dim, concat), (_, split)) = (pieces(x), pieces(y));
                let whole = x.layout.global(&x.shape, &self.seat.mesh);
                Kind::all_to_all(me, as_matrix(&whole, 1), dim, &concat, &split, element)
            }
            (Opcode::Broadcast, ..) => {
                let root = op.int("root").unwrap_or(0) as usize;
                Kind::broadcast(me, members, root, ty.bytes().0 as usize)
            }
            (Opcode::Send | Opcode::Recv, ..) => Kind::transfer(me, ty.bytes().0 as usize),
            (other, ..) => return failed(format!("{} is no collective", other.name())),
        };
        let digest = blake3::hash(agreed(p, op).as_bytes());
        let bytes = digest.as_bytes();
        Ok(Move {
            kind,
            dtype: ty.dtype,
            operand: 0,
            result: 0,
            peers_operand: Vec::new(),
            peers_result: Vec::new(),
            fingerprint: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            op: i as u32,
            via: match op.str("via") {
                Some("kernels") => Via::Kernels,
                Some("nccl") => Via::Nccl,
                _ => Via::Best,
            },
        })
    }
}

/// What a run of collectives looks like from the host: ops that are begun or ended on the device are told in order.
#[derive(Debug)]
pub(super) struct Told<'a> {
    p: &'a Program,
    collectives: Vec<(usize, Route)>,
    /// Which of them were told ended.
    ended: Vec<bool>,
    /// How far the device was seen to be: the furthest op that it began or ended.
    furthest: u64,
}

impl<'a> Told<'a> {
    pub(super) fn new(p: &'a Program) -> Told<'a> {
        let collectives: Vec<(usize, Route)> =
            p.collectives().filter_map(|(i, op)| Some((i, Route::of(op)?))).collect();
        let ended = vec![false; collectives.len()];
        Told { p, collectives, ended, furthest: 0 }
    }

    /// Tells what is new; whether anything was.
    pub(super) fn look(&mut self, groups: &Groups, observer: &mut dyn Observer) -> bool {
        let mut news = false;
        for (route, arrived, done) in groups.reached() {
            // Marks only grow, however far lanes are apart.
            let far =
                arrived.map_or(0, |a| 2 * u64::from(a) + 1).max(done.map_or(0, |d| 2 * u64::from(d) + 2));
            if far > self.furthest {
                self.furthest = far;
                observer.progress((far / 2) as u32);
                news = true;
            }
            for (k, (i, of)) in self.collectives.iter().enumerate().filter(|(_, (_, r))| *r == route) {
                debug_assert_eq!(*of, route);
                if done.is_some_and(|d| *i <= d as usize) && !self.ended[k] {
                    self.ended[k] = true;
                    observer.completed(*i);
                    news = true;
                }
            }
        }
        news
    }

    /// Tells all that is left: the device is done.
    pub(super) fn rest(&mut self, observer: &mut dyn Observer) {
        for (k, (i, _)) in self.collectives.iter().enumerate() {
            if !std::mem::replace(&mut self.ended[k], true) {
                observer.completed(*i);
            }
        }
        observer.progress(self.p.ops.len() as u32);
    }
}

/// Ends all waits at once, and what NCCL has under way on threads of their own: ending one lane may wait for another's kernel.
/// What NCCL does not end in time ends with the process.
fn end(aborters: &[Aborter]) -> Vec<JoinHandle<()>> {
    aborters.iter().for_each(Aborter::stop);
    let through_nccl = aborters.iter().filter(|a| a.through_nccl()).cloned();
    let ended = |a: Aborter| {
        let end = move || {
            a.abort(ENDING);
        };
        std::thread::Builder::new().name("nccl-abort".into()).spawn(end).ok()
    };
    through_nccl.filter_map(ended).collect()
}

/// Which member of a lane the seat is.
fn member(route: Route, seat: &Seat) -> usize {
    let lane = route.lane(&seat.mesh, seat.rank);
    lane.and_then(|l| l.members.iter().position(|r| *r == seat.rank)).unwrap_or(0)
}
