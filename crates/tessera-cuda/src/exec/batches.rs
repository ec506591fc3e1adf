//! Sends and receives that are one launch: each lane of a batch has a stream of its own, so that none waits for another.
//!
//! A lane has one communicator for each direction. NCCL launches what one group brings to several communicators on one stream
//! one after the other, and so would the kernels over peers' memory: two neighbours that both send first would wait for ever.

use std::collections::BTreeMap;

use tessera_device::Route;
use tessera_ir::{Op, Opcode, Program};

use crate::driver::{Done, Event, Failed, Stream};

/// An op's place in its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// Which of the batch's lanes, in order of their first op.
    lane: usize,
    first: bool,
    last: bool,
}

/// The batches of a program while it is enqueued. That the ops of one stand together, on one stream, is proven before.
#[derive(Debug)]
pub(super) struct Batches {
    places: BTreeMap<usize, Place>,
    /// Where the stream of the batch under way was when it began.
    began: Option<Event>,
    ended: Vec<Event>,
}

impl Batches {
    pub(super) fn of(p: &Program) -> Batches {
        Batches { places: places(p), began: None, ended: Vec::new() }
    }

    /// Names of the streams that lanes beyond a batch's first run on, beside the program's own.
    pub(super) fn streams(p: &Program) -> impl Iterator<Item = String> {
        let beside = |(at, place): (usize, Place)| {
            let own = p.streams.get(p.ops[at].stream.0 as usize)?;
            (place.lane > 0).then(|| name(own, place.lane))
        };
        places(p).into_iter().filter_map(beside)
    }

    /// The stream that an op runs on: its `own`, but for a batch's lanes beyond the first.
    pub(super) fn enter<'a>(
        &mut self,
        p: &Program,
        at: usize,
        own: &'a Stream,
        streams: &'a BTreeMap<String, Stream>,
    ) -> Done<&'a Stream> {
        let Some(place) = self.places.get(&at) else { return Ok(own) };
        if place.first {
            own.record(self.began.insert(Event::new()?))?;
        }
        if place.lane == 0 {
            return Ok(own);
        }
        let of = p.streams.get(p.ops[at].stream.0 as usize).map_or("", String::as_str);
        let name = name(of, place.lane);
        let aside = streams.get(&name).ok_or_else(|| Failed(format!("@{} has no stream {name}", p.name)))?;
        let began =
            self.began.as_ref().ok_or_else(|| Failed(format!("@{}: a batch without a first", p.name)))?;
        aside.wait(began)?;
        Ok(aside)
    }

    /// After an op on the stream that [`enter`](Batches::enter) gave: what follows the last of a batch follows all of it.
    pub(super) fn leave(&mut self, at: usize, own: &Stream, used: &Stream) -> Done<()> {
        let Some(place) = self.places.get(&at) else { return Ok(()) };
        if place.lane > 0 {
            let ended = Event::new()?;
            used.record(&ended)?;
            self.ended.push(ended);
        }
        if place.last {
            self.ended.drain(..).try_for_each(|e| own.wait(&e))?;
        }
        Ok(())
    }
}

fn places(p: &Program) -> BTreeMap<usize, Place> {
    let mut out = BTreeMap::new();
    let mut lanes: BTreeMap<i64, Vec<Option<Route>>> = BTreeMap::new();
    let mut last: BTreeMap<i64, usize> = BTreeMap::new();
    for (at, number) in p.ops.iter().enumerate().filter_map(|(at, op)| Some((at, batch(op)?))) {
        let (routes, route) = (lanes.entry(number).or_default(), Route::of(&p.ops[at]));
        let first = routes.is_empty();
        let lane = routes.iter().position(|r| *r == route).unwrap_or_else(|| {
            routes.push(route);
            routes.len() - 1
        });
        out.insert(at, Place { lane, first, last: false });
        last.insert(number, at);
    }
    for at in last.values() {
        out.entry(*at).and_modify(|place| place.last = true);
    }
    out
}

fn batch(op: &Op) -> Option<i64> {
    op.int("batch").filter(|_| matches!(op.opcode, Opcode::Send | Opcode::Recv))
}

fn name(own: &str, lane: usize) -> String {
    format!("{own} beside {lane}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn lanes_of_a_batch_run_beside_one_another_and_each_in_order() {
        let text = "program @p role(a@tp0) mesh(tp=3) streams(compute, comm) { \
            %x = input : f32[2] \
            %before = ttile.collective.issue send %x {axis = \"tp\", to = 1} @comm \
            %a = ttile.collective.issue send %x {axis = \"tp\", batch = 4, to = 1} @comm \
            %b = ttile.collective.issue recv {axis = \"tp\", batch = 4, from = 2} : ticket @comm \
            %c = ttile.collective.issue send %x {axis = \"tp\", batch = 4, to = 1} @comm \
            %d = ttile.collective.issue send %x {axis = \"tp\", batch = 5, to = 2} @comm \
            ttile.collective.wait %before @compute ttile.collective.wait %a @compute \
            %y = ttile.collective.wait %b : f32[2] @compute \
            ttile.collective.wait %c @compute ttile.collective.wait %d @compute output \"y\", %y }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let found: Vec<Option<Place>> = p.collectives().map(|(at, _)| places(&p).get(&at).copied()).collect();
        let place = |lane, first, last| Some(Place { lane, first, last });
        let wanted = [
            None,
            place(0, true, false),
            place(1, false, false),
            // The lane of the first once more: after it.
            place(0, false, true),
            place(0, true, true),
        ];
        assert_eq!(found, wanted);
        assert_eq!(Batches::streams(&p).collect::<Vec<_>>(), ["comm beside 1"]);
    }
}
