//! The hello: the leader compares the parity tables of all ranks, then the digests of their weight
//! shards.

use std::collections::BTreeMap;

use super::{Leader, LeaderStage, RecordEntry};
use crate::codes::{T0754, T0777};
use crate::drift::find_shard_mismatch;
use crate::parity::{ParityDifference, compare_tables, identity_keys, reported_hosts};
use crate::tripwire::CheckSite;
use crate::wire::{HelloAck, ShardFingerprint};
use crate::{Failure, FailureClass, Parity};

impl Leader {
    pub(super) fn own_parity(&self) -> Parity {
        let c = &self.config;
        identity_keys(&c.build, c.plan, &c.programs, &c.tripwires)
            .with_known_key("watchdogs", c.limits.describe())
            .merge(&c.parity)
    }

    pub(super) fn handle_hello(&mut self, rank: u32, ack: HelloAck) {
        match self.stage {
            LeaderStage::Hello { .. } if !self.hellos.contains_key(&rank) => {}
            // A rank that was loading when the stop came may still send its hello.
            LeaderStage::Stopping { .. } => return,
            _ => return self.protocol_violation(rank, "a second hello"),
        }
        self.hellos.insert(rank, ack);
        if self.hellos.len() == self.peers.len() {
            self.compare_hellos();
        }
    }

    /// Checks, once every rank has sent its hello, that the ranks may run together.
    fn compare_hellos(&mut self) {
        let hellos = std::mem::take(&mut self.hellos);
        let mut tables = BTreeMap::new();
        let mut fingerprints = BTreeMap::new();
        // A leader outside the mesh sends no hello to itself.
        if !hellos.contains_key(&0) {
            self.add_startup_entry(0, self.own_parity());
        }
        for (rank, ack) in hellos {
            let table = ack
                .parity
                .with_known_key("build", ack.build)
                .with_known_key("plan digest", format!("{:?}", ack.plan));
            self.add_startup_entry(rank, table.clone());
            tables.insert(rank, table);
            fingerprints.insert(rank, ack.fingerprints);
        }
        let (refused, noted): (Vec<ParityDifference>, Vec<ParityDifference>) =
            compare_tables(&tables, Some((0, &self.own_parity())))
                .into_iter()
                .partition(|d| d.class.ends_run());
        for d in noted {
            self.add_entry(RecordEntry::Note(format!("ranks differ in {d}")));
        }
        let refused: Vec<ParityDifference> = refused.into_iter().filter(|d| self.is_armed(d.code)).collect();
        if let Some(first) = refused.first() {
            let mut text = match refused.len() {
                1 => "1 key differs".to_string(),
                n => format!("{n} keys differ"),
            };
            for d in &refused {
                text += &format!("\n  {d}");
            }
            let rank = first.outliers.first().copied();
            let failure =
                Failure::new(FailureClass::Parity, rank, first.code, text).with_site(CheckSite::Init);
            return self.fail_run(failure);
        }
        // A leader outside of the mesh is a rank of the plan too.
        tables.entry(0).or_insert_with(|| self.own_parity());
        if let Some(failure) = self.compare_hosts(&tables) {
            return self.fail_run(failure);
        }
        if self.shards_agree(&fingerprints, (FailureClass::Parity, CheckSite::Init)) {
            self.stage = LeaderStage::Running;
        }
    }

    /// Compares the hosts that the plan states with those that the ranks report. Ranks of one stated host
    /// on several hosts would exchange data over a network that the plan excludes, so they end the run.
    /// Ranks of several stated hosts on one are only noted: memory of one host is never slower, and this is
    /// how a run over hosts is rehearsed.
    fn compare_hosts(&mut self, tables: &BTreeMap<u32, Parity>) -> Option<Failure> {
        let stated = self.config.hosts.clone()?;
        let real = reported_hosts(tables);
        if let Some((first, second, host)) = stated.find_merged(&real) {
            self.add_entry(RecordEntry::Note(format!(
                "the plan states {}, and the ranks of its hosts {first} and {second} all run on {host}. The run \
                 continues, because memory of one host is no slower than a network. To measure the network between \
                 the hosts, start the ranks of each on a host of its own.",
                stated.describe()
            )));
        }
        let misplaced = stated.find_misplaced(&real);
        let first = misplaced.first().filter(|_| self.is_armed(&T0777))?;
        let text: Vec<String> = misplaced.iter().map(ToString::to_string).collect();
        let failure = Failure::new(FailureClass::Parity, Some(first.rank.0), &T0777, text.join("\n  "));
        Some(failure.with_site(CheckSite::Init))
    }

    fn add_startup_entry(&mut self, rank: u32, settings: Parity) {
        let tripwires = settings.armed_tripwires();
        self.add_entry(RecordEntry::Startup { rank, settings, tripwires });
    }

    /// Checks that the ranks' weights do not contradict each other; otherwise the run fails.
    pub(super) fn shards_agree(
        &mut self,
        fingerprints: &BTreeMap<u32, Vec<ShardFingerprint>>,
        (class, place): (FailureClass, CheckSite),
    ) -> bool {
        if !self.is_armed(&T0754) {
            return true;
        }
        let Some((rank, text)) = find_shard_mismatch(fingerprints) else { return true };
        self.fail_run(Failure::new(class, Some(rank), &T0754, text).with_site(place));
        false
    }
}
