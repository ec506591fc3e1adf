//! The hello: every rank's table against every other's, then the weights shard by shard.

use std::collections::BTreeMap;

use super::{Action, Leader, Stage};
use crate::drift::{T0754, shards_differ};
use crate::parity::{Difference, ParityClass, compare, identity};
use crate::tripwire::Place;
use crate::wire::{HelloAck, ShardPrint};
use crate::{Failure, FailureClass, Parity};

impl Leader {
    pub(super) fn own_parity(&self) -> Parity {
        let c = &self.config;
        identity(&c.build, c.plan, &c.census, &c.tripwires).join(&c.parity)
    }

    pub(super) fn hello_ack(&mut self, rank: u32, ack: HelloAck, out: &mut Vec<Action>) {
        match self.stage {
            Stage::Hello { .. } if !self.hellos.contains_key(&rank) => {}
            // A rank that was loading when the stop came may still say hello.
            Stage::Stopping { .. } => return,
            _ => return self.protocol(rank, "a second hello".into(), out),
        }
        self.hellos.insert(rank, ack);
        if self.hellos.len() == self.peers.len() {
            self.judge(out);
        }
    }

    /// Every rank is there: whether they may run together.
    fn judge(&mut self, out: &mut Vec<Action>) {
        let hellos = std::mem::take(&mut self.hellos);
        let mut tables = BTreeMap::new();
        let mut prints = BTreeMap::new();
        for (rank, ack) in hellos {
            let shown = ack.parity.set("build", ack.build).set("plan digest", format!("{:?}", ack.plan));
            tables.insert(rank, shown);
            prints.insert(rank, ack.fingerprints);
        }
        let (refused, noted): (Vec<Difference>, Vec<Difference>) =
            compare(&tables, Some((0, &self.own_parity())))
                .into_iter()
                .partition(|d| d.class == ParityClass::AtInit);
        out.extend(noted.iter().map(|d| Action::Note(format!("ranks differ in {d}"))));
        let refused: Vec<Difference> = refused.into_iter().filter(|d| self.armed(d.code)).collect();
        if let Some(first) = refused.first() {
            let mut text = match refused.len() {
                1 => "1 key differs".to_string(),
                n => format!("{n} keys differ"),
            };
            for d in &refused {
                text += &format!("\n  {d}");
            }
            let rank = first.odd.first().copied();
            let failure = Failure::new(FailureClass::Parity, rank, first.code, text).at(Place::Init);
            return self.fail(failure, out);
        }
        if self.shards_agree(&prints, (FailureClass::Parity, Place::Init), out) {
            self.stage = Stage::Running;
        }
    }

    /// Whether no two ranks' weights contradict each other; otherwise the run ends.
    pub(super) fn shards_agree(
        &mut self,
        prints: &BTreeMap<u32, Vec<ShardPrint>>,
        (class, place): (FailureClass, Place),
        out: &mut Vec<Action>,
    ) -> bool {
        if !self.armed(&T0754) {
            return true;
        }
        let Some((rank, text)) = shards_differ(prints) else { return true };
        self.fail(Failure::new(class, Some(rank), &T0754, text).at(place), out);
        false
    }
}
