//! Programs of real trainings and servers, executed by a model of hosts and devices up to a hang or to some
//! moment of a healthy run: the right rank, or no accusation.
//!
//! A rank is a list of words. `tp:ar64@7` is an all_reduce of 64 elements in the group `tp` from line 7 of
//! the program, `s3` a send to rank 3 and `r3` a receive. A word that begins with `~` is on a stream of its
//! group. `stop` ends what the host issues, `stuck` is a kernel that never ends, and at `wait` the host waits
//! for its device.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_torch::flight::{
    EntryState, FaultKind, FlightDump, FlightEntry, FlightGroup, FlightReport, StackFrame, examine_dumps,
};

/// Rounds after which the watchdog takes a completed collective off its list. Fewer than the smallest ring
/// holds: a ring of 2,000 collectives spans more than the watchdog's 0.1 s.
const RETIRED_AFTER: u64 = 6;

/// Something that a host issued.
#[derive(Debug, Clone, PartialEq)]
struct Issued {
    /// Empty for a kernel that never ends.
    group: String,
    op: String,
    count: u64,
    line: u32,
    peer: Option<u32>,
    is_async: bool,
    number: u64,
    round: u64,
    completed: Option<u64>,
}

#[derive(Debug, Clone, Default)]
struct Rank {
    words: Vec<String>,
    next: usize,
    issued: Vec<Issued>,
    numbers: BTreeMap<(String, Option<u32>), u64>,
}

struct Model {
    groups: BTreeMap<String, Vec<u32>>,
    ranks: Vec<Rank>,
    round: u64,
    /// How many collectives a host enqueues beyond those that its device completed.
    ahead: usize,
}

impl Model {
    fn new(groups: &[(&str, &[u32])], programs: &[impl AsRef<str>]) -> Model {
        let groups = groups.iter().map(|(name, ranks)| (name.to_string(), ranks.to_vec())).collect();
        let words = |p: &str| p.split_whitespace().map(str::to_string).collect();
        let ranks = programs.iter().map(|p| Rank { words: words(p.as_ref()), ..Rank::default() });
        Model { groups, ranks: ranks.collect(), round: 0, ahead: 4 }
    }

    /// Executes rounds, in each of which a host issues one word and a device completes one collective.
    /// Returns whether anything happened in the last one.
    fn run(&mut self, rounds: u64) -> bool {
        let mut moved = false;
        for _ in 0..rounds {
            self.round += 1;
            moved = false;
            for rank in 0..self.ranks.len() {
                moved |= self.issue(rank);
            }
            moved |= self.complete();
            if !moved {
                break;
            }
        }
        moved
    }

    fn issue(&mut self, at: usize) -> bool {
        let (round, ahead) = (self.round, self.ahead);
        let rank = &mut self.ranks[at];
        let is_pending = |i: &&Issued| i.completed.is_none() && !i.group.is_empty() && i.op != "s";
        let pending = rank.issued.iter().filter(is_pending).count();
        let Some(word) = rank.words.get(rank.next).cloned() else { return false };
        if word == "stop" || pending >= ahead || word == "wait" && pending > 0 {
            return false;
        }
        rank.next += 1;
        if word == "wait" {
            return true;
        }
        let (word, is_async) = word.strip_prefix('~').map_or((word.as_str(), false), |w| (w, true));
        let (group, call) = word.split_once(':').unwrap_or(("", word));
        let (call, line) = call.split_once('@').unwrap_or((call, "1"));
        let letters = call.trim_end_matches(|c: char| c.is_ascii_digit());
        let count = call[letters.len()..].parse().unwrap_or(0);
        let peer = matches!(letters, "s" | "r").then_some(count as u32);
        let number = rank.numbers.entry((group.to_string(), None)).or_default();
        if peer.is_none() {
            *number += 1;
        }
        rank.issued.push(Issued {
            group: group.to_string(),
            op: letters.to_string(),
            count: if peer.is_some() { 512 } else { count },
            line: line.parse().unwrap(),
            peer,
            is_async: is_async || letters == "s",
            number: *number,
            round,
            completed: None,
        });
        true
    }

    /// Completes on each device what is at the head of its stream on all members.
    fn complete(&mut self) -> bool {
        let mut done: Vec<(usize, usize)> = Vec::new();
        for rank in 0..self.ranks.len() {
            for at in self.list_heads(rank) {
                let own = &self.ranks[rank].issued[at];
                let peers = own.peer.map_or_else(|| self.groups[&own.group].clone(), |peer| vec![peer]);
                let matching = peers.iter().filter_map(|p| self.find_side(*p as usize, rank, own)).count();
                if matching == peers.len() {
                    done.push((rank, at));
                }
            }
        }
        for (rank, at) in &done {
            self.ranks[*rank].issued[*at].completed = Some(self.round);
        }
        !done.is_empty()
    }

    /// Lists what the streams of a rank execute now.
    fn list_heads(&self, rank: usize) -> Vec<usize> {
        let issued = &self.ranks[rank].issued;
        let is_head = |at: &usize| {
            let own = &issued[*at];
            own.completed.is_none()
                && !own.group.is_empty()
                && issued[..*at]
                    .iter()
                    .filter(|e| e.completed.is_none())
                    .all(|e| e.is_async && (e.group != own.group || e.peer != own.peer || e.op != own.op))
        };
        (0..issued.len()).filter(is_head).collect()
    }

    fn find_side(&self, peer: usize, rank: usize, own: &Issued) -> Option<()> {
        let heads = self.list_heads(peer);
        let is_side = |at: &&usize| {
            let theirs = &self.ranks[peer].issued[**at];
            theirs.group == own.group
                && (theirs.count == own.count || own.op == "a2a")
                && match own.peer {
                    None => theirs.op == own.op && theirs.number == own.number,
                    Some(_) => theirs.op != own.op && theirs.peer == Some(rank as u32),
                }
        };
        heads.iter().find(is_side).map(|_| ())
    }

    /// Returns the dump of a rank, of the last `ring` entries.
    fn dump(&self, rank: u32, ring: usize) -> FlightDump {
        let own = self.groups.iter().filter(|(_, ranks)| ranks.contains(&rank));
        let mut dump = FlightDump {
            rank,
            version: (2, 10),
            groups: own
                .map(|(name, ranks)| {
                    (name.clone(), FlightGroup { description: String::new(), ranks: ranks.clone() })
                })
                .collect(),
            ..FlightDump::default()
        };
        for name in dump.groups.keys() {
            let last = self.ranks[rank as usize].numbers.get(&(name.clone(), None)).copied().unwrap_or(0);
            dump.last_enqueued.insert(name.clone(), last);
        }
        let issued = self.ranks[rank as usize].issued.iter().filter(|i| !i.group.is_empty());
        let mut p2p: BTreeMap<String, u64> = BTreeMap::new();
        for (at, i) in issued.enumerate() {
            let launch = p2p.entry(i.group.clone()).or_default();
            *launch += u64::from(i.peer.is_some());
            dump.entries.push(self.make_entry(rank, at as u64, i, *launch));
        }
        let lost = dump.entries.len().saturating_sub(ring);
        dump.entries.drain(..lost);
        dump.lost_head = lost > 0;
        dump
    }

    fn make_entry(&self, rank: u32, at: u64, i: &Issued, p2p: u64) -> FlightEntry {
        let index = |r: u32| self.groups[&i.group].iter().position(|m| *m == r).unwrap();
        let op = match (i.op.as_str(), i.peer) {
            ("s", Some(peer)) => format!("send {}->{}", index(rank), index(peer)),
            (_, Some(peer)) => format!("recv {}<-{}", index(rank), index(peer)),
            ("ag", _) => "_all_gather_base".to_string(),
            ("rs", _) => "_reduce_scatter_base".to_string(),
            ("bc", _) => "broadcast".to_string(),
            ("a2a", _) => "all_to_all".to_string(),
            _ => "all_reduce".to_string(),
        };
        let frame = StackFrame { function: "step".into(), file: "train.py".into(), line: i.line };
        let shapes: Arc<[Vec<u64>]> = Arc::from([vec![i.count]]);
        let state = i.completed.map_or(EntryState::Scheduled, |_| EntryState::Completed);
        FlightEntry {
            record_id: at,
            group: i.group.as_str().into(),
            sequence: if i.peer.is_some() { p2p } else { i.number },
            launch: (i.number, p2p),
            is_p2p: i.peer.is_some(),
            op: op.into(),
            input_shapes: shapes.clone(),
            output_shapes: shapes,
            input_dtypes: Arc::from(["Float".into()]),
            state,
            // The watchdog retires what is complete within some rounds.
            retired: i.completed.is_some_and(|round| round + RETIRED_AFTER < self.round),
            created_ns: 1000 * i.round + u64::from(rank),
            stack_hash: u64::from(i.line),
            frames: Arc::from([frame]),
        }
    }
}

const RING: usize = 2000;

/// Runs programs until they hang or end, for as long as a watchdog waits.
fn run_to_end(groups: &[(&str, &[u32])], programs: &[impl AsRef<str>], ring: usize) -> FlightReport {
    run_ahead(groups, programs, ring, 4)
}

/// Runs programs whose hosts enqueue this many collectives beyond those that their devices completed.
fn run_ahead(
    groups: &[(&str, &[u32])],
    programs: &[impl AsRef<str>],
    ring: usize,
    ahead: usize,
) -> FlightReport {
    let mut model = Model::new(groups, programs);
    model.ahead = ahead;
    while model.run(1) {}
    model.round += 100;
    let dumps = (0..programs.len() as u32).map(|rank| (rank, model.dump(rank, ring)));
    examine_dumps(&dumps.collect())
}

#[track_caller]
fn assert_cause(report: &FlightReport, kind: FaultKind, ranks: &[u32]) {
    let found: Vec<(FaultKind, &[u32])> = report.findings.iter().map(|f| (f.kind, &f.ranks[..])).collect();
    assert_eq!(found, [(kind, ranks)], "{}", report.to_text("run"));
}

/// Dumps a healthy run at every moment, all ranks at once and one or several rounds apart, with whole
/// and wrapped rings: no rank is accused.
#[track_caller]
fn assert_healthy(groups: &[(&str, &[u32])], programs: &[impl AsRef<str>]) {
    let n = programs.len() as u32;
    for ahead in [1, 3, 8] {
        for apart in [0, 1, 4] {
            let mut model = Model::new(groups, programs);
            model.ahead = ahead;
            let mut moments: Vec<BTreeMap<u32, FlightDump>> = Vec::new();
            for ring in [RING, 17] {
                let mut model = Model::new(groups, programs);
                model.ahead = ahead;
                while model.run(1) {
                    moments.push((0..n).map(|rank| (rank, model.dump(rank, ring))).collect());
                }
                let ended = model.ranks.iter().all(|r| r.next == r.words.len());
                assert!(ended, "the program of the test hangs");
                // The watchdog retires nothing before.
                for moment in 24..moments.len() {
                    let of_rank = |rank: u32| {
                        let at = (moment + apart * (rank as usize * 7 % 5)).min(moments.len() - 1);
                        (rank, moments[at][&rank].clone())
                    };
                    let report = examine_dumps(&(0..n).map(of_rank).collect());
                    assert!(
                        report.findings.is_empty(),
                        "ahead {ahead}, apart {apart}, ring {ring}, moment {moment}: {}",
                        report.to_text("run")
                    );
                }
                moments.clear();
            }
        }
    }
}

const WORLD: &[(&str, &[u32])] = &[("0", &[0, 1, 2, 3])];
const GRID: &[(&str, &[u32])] =
    &[("0", &[0, 1, 2, 3]), ("1", &[0, 1]), ("2", &[2, 3]), ("3", &[0, 2]), ("4", &[1, 3])];
/// 8 ranks: tensor parallel pairs, data parallel pairs and pipelines of 2 stages.
const MESH: &[(&str, &[u32])] = &[
    ("0", &[0, 1, 2, 3, 4, 5, 6, 7]),
    ("1", &[0, 1]),
    ("2", &[2, 3]),
    ("3", &[4, 5]),
    ("4", &[6, 7]),
    ("5", &[0, 2]),
    ("6", &[1, 3]),
    ("7", &[4, 6]),
    ("8", &[5, 7]),
    ("9", &[0, 4]),
    ("10", &[1, 5]),
    ("11", &[2, 6]),
    ("12", &[3, 7]),
];

/// One step of a pipeline of `stages` with one forward and one backward in turn.
fn pipeline_step(stage: usize, stages: usize, batches: usize) -> String {
    let mut words = String::new();
    let forward = |words: &mut String| {
        if stage > 0 {
            *words += &format!("0:r{}@1 ", stage - 1);
        }
        if stage + 1 < stages {
            *words += &format!("0:s{}@2 ", stage + 1);
        }
    };
    let backward = |words: &mut String| {
        if stage + 1 < stages {
            *words += &format!("0:r{}@3 ", stage + 1);
        }
        if stage > 0 {
            *words += &format!("0:s{}@4 ", stage - 1);
        }
    };
    let warm_up = (stages - stage - 1).min(batches);
    (0..warm_up).for_each(|_| forward(&mut words));
    for _ in warm_up..batches {
        forward(&mut words);
        backward(&mut words);
    }
    (0..warm_up).for_each(|_| backward(&mut words));
    words
}

fn pipeline(batches: usize) -> Vec<String> {
    (0..4).map(|stage| format!("{0} 0:ar1@5 {0} 0:ar1@5", pipeline_step(stage, 4, batches))).collect()
}

/// Two steps of a rank of the 3-d mesh: two layers in TP, a transfer of the pipeline, gradients in DP, a
/// norm over all ranks.
fn mesh_rank(rank: u32) -> Vec<String> {
    let (stage, peer) = (rank / 4, (rank + 4) % 8);
    let find = |range: std::ops::Range<usize>| {
        MESH[range].iter().find(|(_, ranks)| ranks.contains(&rank)).unwrap().0
    };
    let (tp, dp, pp) = (find(1..5), find(5..9), find(9..13));
    let layers = format!("{tp}:ar64@1 {tp}:ar64@2");
    let back = format!("{tp}:ar64@3 {tp}:ar64@4");
    let step = if stage == 0 {
        format!("{layers} {pp}:s{peer}@5 {pp}:r{peer}@6 {back} ~{dp}:ar512@7 {dp}:ar256@8 0:ar1@9")
    } else {
        format!("{pp}:r{peer}@6 {layers} {back} {pp}:s{peer}@5 ~{dp}:ar512@7 {dp}:ar256@8 0:ar1@9")
    };
    let words = format!("0:ar1@20 {step} {step} {step}");
    words.split_whitespace().map(str::to_string).collect()
}

fn mesh() -> Vec<String> {
    (0..8).map(|rank| mesh_rank(rank).join(" ")).collect()
}

fn sharded() -> Vec<String> {
    let step = "~1:ag64@1 ~1:ag64@2 0:ar8@3 ~1:ag64@2 0:ar8@3 ~1:ag64@2 ~1:rs64@4 ~2:ar64@5 ~1:rs64@4 ~2:ar64@5 0:ar1@6";
    let of_rank = |rank: u32| {
        let (shard, replica) = (1 + rank / 2, 3 + rank % 2);
        let step = step.replace("2:", &format!("{replica}:")).replace("1:", &format!("{shard}:"));
        format!("{step} {step} {step}")
    };
    (0..4).map(of_rank).collect()
}

#[test]
fn pipelines_are_healthy_at_every_moment() {
    assert_healthy(WORLD, &pipeline(6));
    assert_healthy(WORLD, &pipeline(2));
}

#[test]
fn a_mesh_of_three_dimensions_is_healthy_at_every_moment() {
    assert_healthy(MESH, &mesh());
}

#[test]
fn sharded_layers_with_prefetch_are_healthy_at_every_moment() {
    assert_healthy(GRID, &sharded());
}

#[test]
fn roles_object_broadcasts_and_uneven_exchanges_are_healthy_at_every_moment() {
    let role = |rank: u32| {
        let line = if rank == 0 { 7 } else { 9 };
        let step = format!("0:bc1@{line} 0:bc100@{} 0:a2a{}@3 0:ar1@4", line + 1, 100 + rank);
        format!("{step} {step} {step} {step}")
    };
    assert_healthy(WORLD, &(0..4).map(role).collect::<Vec<_>>());
    // Each rank has its own number of transfers before the step's end.
    let accumulate = ["0:s1 0:s1 0:s1 0:ar8@3", "0:r0 0:r0 0:r0 0:s2 0:ar8@3", "0:r1 0:ar8@3", "0:ar8@3"];
    assert_healthy(WORLD, &accumulate.map(|p| format!("{p} {p} {p}")));
}

/// Runs programs with a change of one rank, with whole and wrapped rings.
#[track_caller]
fn assert_changed(
    groups: &[(&str, &[u32])],
    programs: &[String],
    change: (u32, usize, &str),
    kind: FaultKind,
) {
    let mut changed = programs.to_vec();
    let (rank, at, what) = change;
    let own = &mut changed[rank as usize];
    *own = change_word(own, at, what);
    for ring in [RING, 17] {
        assert_cause(&run_to_end(groups, &changed, ring), kind, &[rank]);
    }
}

/// A host that stops is the one at fault at any place of any program, and no rank whose own wait is a
/// consequence: hosts run no more than some collectives ahead of their devices.
#[test]
fn a_host_that_stops_is_silent_and_the_ranks_behind_it_are_not() {
    for (rank, at) in [(0, 0), (1, 0), (3, 0), (2, 5), (3, 9), (0, 12), (1, 20)] {
        assert_changed(WORLD, &pipeline(6), (rank, at, "stop"), FaultKind::HostSilent);
    }
    for (rank, at) in [(0, 0), (5, 0), (3, 7), (6, 9), (7, 12), (2, 20), (1, 24)] {
        assert_changed(MESH, &mesh(), (rank, at, "stop"), FaultKind::HostSilent);
    }
    for (rank, at) in [(0, 0), (3, 0), (1, 7), (2, 12), (3, 21), (0, 31), (2, 32)] {
        assert_changed(GRID, &sharded(), (rank, at, "stop"), FaultKind::HostSilent);
    }
}

/// All hosts enqueued the collective before which a device is stuck, and nothing shows whose device it is.
#[test]
fn a_stuck_device_that_no_dump_shows_accuses_nobody() {
    let stuck = |programs: &[String], rank: usize, at: usize| {
        let mut changed = programs.to_vec();
        changed[rank] = change_word(&changed[rank], at, "stuck");
        changed
    };
    for (rank, at) in [(0, 0), (1, 0), (3, 0), (2, 5), (3, 9), (0, 12), (1, 20)] {
        let report = run_to_end(WORLD, &stuck(&pipeline(6), rank, at), RING);
        assert!(report.findings.is_empty(), "{rank} {at}: {}", report.to_text("run"));
    }
    for (rank, at) in [(0, 0), (5, 0), (3, 7), (6, 9), (7, 12), (2, 20), (1, 24)] {
        let report = run_to_end(MESH, &stuck(&mesh(), rank, at), RING);
        assert!(report.findings.is_empty(), "{rank} {at}: {}", report.to_text("run"));
    }
}

#[test]
fn a_skipped_or_extra_collective_of_a_large_group_is_found_where_small_groups_wait() {
    assert_changed(MESH, &mesh(), (0, 0, "skip"), FaultKind::Skipped);
    assert_changed(MESH, &mesh(), (5, 0, "shape"), FaultKind::OtherShape);
    assert_changed(MESH, &mesh(), (6, 9, "shape"), FaultKind::OtherShape);
    assert_changed(MESH, &mesh(), (0, 0, "0:ar1@99"), FaultKind::WaitCycle);
    assert_changed(GRID, &sharded(), (3, 0, "0:ar1@99"), FaultKind::Extra);
    assert_changed(GRID, &sharded(), (1, 7, "0:ar1@99"), FaultKind::Extra);
    assert_changed(GRID, &sharded(), (3, 21, "skip"), FaultKind::Skipped);
    assert_changed(GRID, &sharded(), (2, 32, "shape"), FaultKind::OtherShape);
}

/// A small group has fewer members than a large one, which is no sign that they departed.
#[test]
fn the_members_of_a_small_group_are_no_minority_of_a_large_one() {
    for (rank, at, what) in [(3, 7, "0:ar1@99"), (1, 24, "0:ar1@99"), (1, 24, "skip")] {
        let mut changed = mesh();
        changed[rank as usize] = change_word(&changed[rank as usize], at, what);
        let report = run_to_end(MESH, &changed, RING);
        assert_eq!(report.findings.len(), 1);
        assert!(report.findings[0].ranks.contains(&rank), "{}", report.to_text("run"));
    }
}

#[test]
fn two_faults_at_once_name_their_ranks() {
    let step = "0:ar8@1 0:ar9@2 0:ar10@3 ".repeat(4);
    let change = |faults: &[(usize, usize, &str)]| {
        let mut programs = vec![step.clone(); 4];
        for (rank, at, what) in faults {
            programs[*rank] = change_word(&programs[*rank], *at, what);
        }
        run_to_end(WORLD, &programs, RING)
    };
    assert_cause(&change(&[(1, 4, "stop"), (2, 4, "stop")]), FaultKind::HostSilent, &[1, 2]);
    assert_cause(&change(&[(1, 3, "stop"), (2, 5, "stop")]), FaultKind::HostSilent, &[1]);
    assert_cause(&change(&[(1, 4, "skip"), (2, 4, "skip")]), FaultKind::Skipped, &[1, 2]);
    assert_cause(&change(&[(1, 4, "skip"), (2, 6, "stop")]), FaultKind::Skipped, &[1]);
    let mut apart = mesh();
    apart[0] = change_word(&apart[0], 3, "stop");
    apart[7] = change_word(&apart[7], 5, "stop");
    let report = run_to_end(MESH, &apart, RING);
    let ranks: Vec<u32> = report.findings.iter().flat_map(|f| f.ranks.clone()).collect();
    assert_eq!(ranks, [0, 7], "{}", report.to_text("run"));
}

/// A rank that ended its part and left no dump is missed by nobody.
#[test]
fn a_rank_that_left_after_its_last_collective_is_not_at_fault() {
    let programs = ["0:ar8@1 1:ar8@2 1:ar8@2", "0:ar8@1 1:ar8@2 stop", "0:ar8@1", "0:ar8@1"];
    let mut model = Model::new(GRID, &programs);
    while model.run(1) {}
    model.round += 100;
    let dumps = [0, 1, 2].map(|rank| (rank, model.dump(rank, RING)));
    assert_cause(&examine_dumps(&dumps.into_iter().collect()), FaultKind::HostSilent, &[1]);
}

/// Inserts a word, or removes the one at this place, or gives it another size.
fn change_word(program: &str, at: usize, what: &str) -> String {
    let mut words: Vec<String> = program.split_whitespace().map(str::to_string).collect();
    match what {
        "skip" => drop(words.remove(at)),
        "shape" => words[at] = words[at].replace('@', "3@"),
        word => words.insert(at, word.to_string()),
    }
    words.join(" ")
}

/// After one odd size the ranks go on in step, also where every other size is the same.
#[test]
fn an_odd_size_in_a_small_group_is_no_skipped_collective() {
    for change in [(0, 0, "shape"), (7, 12, "shape"), (2, 20, "shape")] {
        assert_changed(MESH, &mesh(), change, FaultKind::OtherShape);
    }
}

/// A rank that issues two collectives of two groups in an order of its own, at any place of the ranks.
#[test]
fn one_rank_with_another_order_of_two_groups_is_found() {
    let groups: &[(&str, &[u32])] = &[("0", &[0, 1, 2, 3]), ("1", &[0, 1, 2, 3]), ("7", &[0, 1, 2, 3])];
    let usual = "0:ar8@1 1:ag64@2 1:rs64@3 ";
    for rank in 0..4 {
        let mut programs = vec![usual.repeat(4); 4];
        programs[rank] = format!("{usual} 1:ag64@2 0:ar8@1 1:rs64@3 {usual}{usual}");
        assert_cause(&run_to_end(groups, &programs, RING), FaultKind::WaitCycle, &[rank as u32]);
    }
}

/// Inserts words before the one at this place and removes so many from there on.
fn replace_words(program: &str, at: usize, removed: usize, what: &str) -> String {
    let mut words: Vec<&str> = program.split_whitespace().collect();
    words.splice(at..at + removed, what.split_whitespace());
    words.join(" ")
}

#[track_caller]
fn assert_count(report: &FlightReport, count: u64, certainty: &str) {
    let finding = &report.to_json()["findings"][0];
    assert_eq!((&finding["count"], &finding["certainty"]), (&count.into(), &certainty.into()), "{finding}");
}

/// A step of sharded layers: forward, backward, the loss.
const LAYERS: &str = "0:ag64@1 0:ag64@2 0:ag64@3 0:rs64@4 0:rs64@5 0:rs64@6 0:ar8@7 ";

#[test]
fn several_extra_or_skipped_collectives_are_one_shift_with_their_count() {
    let usual = LAYERS.repeat(4);
    for (ahead, certainty) in [(12, "certain"), (4, "likely")] {
        let run = |odd: String| {
            let programs = [&usual, &odd, &usual, &usual];
            run_ahead(WORLD, &programs, RING, ahead)
        };
        // A forward that one rank runs alone, as an evaluation does.
        let report = run(replace_words(&usual, 14, 0, "0:ag32@21 0:ag32@22 0:ag32@23"));
        assert_cause(&report, FaultKind::Extra, &[1]);
        assert_count(&report, 3, certainty);
        assert!(report.findings[0].summarise().contains("issued 3 extra collectives, from collective 15"));
        // A backward that one rank leaves out.
        let report = run(replace_words(&usual, 17, 3, ""));
        assert_cause(&report, FaultKind::Skipped, &[1]);
        assert_count(&report, 3, certainty);
        assert!(report.findings[0].summarise().contains("skipped 3 collectives, from collective 18"));
    }
    // Forwards of equal sizes differ in their call sites alone.
    let odd = replace_words(&usual, 14, 0, "0:ag64@21 0:ag64@22 0:ag64@23");
    let report = run_ahead(WORLD, &[&usual, &odd, &usual, &usual], RING, 12);
    assert_cause(&report, FaultKind::Extra, &[1]);
    assert_count(&report, 3, "likely");
}

/// In a program whose rounds repeat, a shift by a whole round fits whatever a rank issued once.
#[test]
fn one_other_op_after_which_a_rank_goes_on_in_step_is_no_shift_by_a_round() {
    let usual = LAYERS.repeat(6);
    for ahead in [4, 12, 24] {
        let odd = replace_words(&usual, 15, 1, "0:bc64@30");
        let report = run_ahead(WORLD, &[&usual, &usual, &odd, &usual], RING, ahead);
        assert_cause(&report, FaultKind::OtherOp, &[2]);
    }
    // An evaluation on all ranks in every second step.
    let evaluated = format!("{LAYERS}{LAYERS}0:ag64@21 0:ag64@22 0:ag64@23 ").repeat(4);
    assert_healthy(WORLD, &[evaluated.as_str(); 4]);
}

const PAIR: &[(&str, &[u32])] = &[("0", &[0, 1])];

/// The hosts of the peers wait in the collective that the rank skipped, so their dumps end there.
#[test]
fn a_skipped_collective_in_which_the_peers_hosts_wait_is_found_by_their_earlier_rounds() {
    let round = "0:ar640@5 wait 0:ar1@6 ";
    let usual = round.repeat(4);
    let odd = replace_words(&usual, 6, 2, "");
    let report = run_to_end(WORLD, &[&usual, &usual, &odd, &usual], RING);
    assert_cause(&report, FaultKind::Skipped, &[2]);
    assert_count(&report, 1, "likely");
    // Between two ranks, the one that runs a line twice in a row departed, whichever it is.
    assert_cause(&run_to_end(PAIR, &[&usual, &odd], RING), FaultKind::Skipped, &[1]);
    assert_cause(&run_to_end(PAIR, &[&odd, &usual], RING), FaultKind::Skipped, &[0]);
}

#[test]
fn earlier_rounds_make_no_skipped_collective_of_another_fault() {
    let usual = "0:ar640@5 wait 0:ar1@6 0:ar2@7 ".repeat(4);
    let run = |odd: String| run_to_end(WORLD, &[&usual, &usual, &odd, &usual], RING);
    // The line of the second collective runs twice, and what follows it in every round shows that.
    assert_cause(&run(replace_words(&usual, 11, 0, "0:ar1@6")), FaultKind::Extra, &[2]);
    assert_cause(&run(replace_words(&usual, 8, 1, "0:bc640@9")), FaultKind::OtherOp, &[2]);
    // One line passes two sizes in turn: a rank that passes the other one padded its input wrongly.
    let sizes = "0:ar64@5 wait 0:ar128@5 wait ".repeat(4);
    let odd = replace_words(&sizes, 8, 1, "0:ar128@5");
    let report = run_to_end(WORLD, &[&sizes, &sizes, &odd, &sizes], RING);
    assert_cause(&report, FaultKind::OtherShape, &[2]);
}

/// Runs programs until they hang. One rank writes its dump and aborts, by which the transfers of its peers
/// end; these go on and write theirs.
fn run_to_abort(programs: &[String], first: u32) -> BTreeMap<u32, FlightDump> {
    let mut model = Model::new(PAIR, programs);
    while model.run(1) {}
    model.round += 100;
    let mut dumps = BTreeMap::from([(first, model.dump(first, RING))]);
    let peers = (0..programs.len()).filter(|rank| *rank != first as usize);
    for rank in peers.clone() {
        let round = model.round;
        let ended = |i: &&mut Issued| i.completed.is_none() && i.peer == Some(first);
        model.ranks[rank].issued.iter_mut().filter(ended).for_each(|i| i.completed = Some(round));
    }
    while model.run(1) {}
    dumps.extend(peers.map(|rank| (rank as u32, model.dump(rank as u32, RING))));
    dumps
}

#[test]
fn a_receive_that_an_abort_ended_is_one_in_which_the_rank_waited() {
    let rounds = "0:ar8@1 ".repeat(8);
    let sender = |peer: u32| format!("{rounds} 0:s{peer}@2 0:s{peer}@2 0:r{peer}@3 wait 0:ar8@4");
    let receiver = |peer: u32| format!("{rounds} 0:r{peer}@2 0:r{peer}@2 0:r{peer}@3 wait 0:ar8@4");
    for programs in [[sender(1), receiver(0)], [receiver(1), sender(0)]] {
        for first in [0, 1] {
            let dumps = run_to_abort(&programs, first);
            let report = examine_dumps(&dumps);
            assert_cause(&report, FaultKind::WaitCycle, &[0, 1]);
            assert_eq!(report.findings[0].certainty.name(), "likely");
            assert!(report.findings[0].doubts[0].contains("an abort ended it"), "{}", report.to_text("run"));
            // The same dumps accuse nobody if the ring may have lost the send, or if transfers are
            // launched together, so that a receive may end before the peer's.
            let mut lost = dumps.clone();
            lost.get_mut(&first).unwrap().lost_head = true;
            assert!(examine_dumps(&lost).findings.is_empty());
            let mut together = dumps.clone();
            let entries = &mut together.get_mut(&first).unwrap().entries;
            let mut end = entries[0].clone();
            end.op = "coalesced".into();
            entries.insert(0, end);
            assert!(examine_dumps(&together).findings.is_empty());
            let mut cut = dumps.clone();
            let pending = cut.get_mut(&first).unwrap().entries.last_mut().unwrap();
            let batch = StackFrame { function: "batch_isend_irecv".into(), ..pending.frames[0].clone() };
            pending.frames = Arc::from([pending.frames[0].clone(), batch]);
            assert!(examine_dumps(&cut).findings.is_empty());
        }
    }
}

/// Two ranks that answer each other, dumped at any two moments: no receive of theirs reads as aborted.
#[test]
fn ranks_that_answer_each_other_are_healthy_at_any_two_moments() {
    let asks = |peer: u32| format!("0:s{peer}@1 0:r{peer}@2 ").repeat(12);
    let answers = |peer: u32| format!("0:r{peer}@1 0:s{peer}@2 ").repeat(12);
    let asks_twice = format!("{0}{0}{1}{1}", "0:s1@1 ", "0:r1@2 ").repeat(6);
    for programs in [[asks(1), answers(0)], [answers(1), asks(0)], [asks_twice, answers(0)]] {
        let mut model = Model::new(PAIR, &programs);
        let mut moments = Vec::new();
        while model.run(1) {
            moments.push([model.dump(0, RING), model.dump(1, RING)]);
        }
        assert!(model.ranks.iter().all(|r| r.next == r.words.len()), "the program of the test hangs");
        for first in &moments[24..] {
            for second in &moments[24..] {
                let dumps = BTreeMap::from([(0, first[0].clone()), (1, second[1].clone())]);
                let report = examine_dumps(&dumps);
                assert!(report.findings.is_empty(), "{}", report.to_text("run"));
            }
        }
    }
}
