//! Sends and receives that are one launch: each lane of a batch has a stream of its own, so that none waits for another.
//!
//! A lane has one communicator for each direction. NCCL launches what one group brings to several communicators on one stream
//! one after the other, and so would the kernels over peers' memory: two neighbours that both send first would wait for ever.

use std::collections::BTreeMap;

use tessera_device::Route;
use tessera_ir::{Op, Opcode, Program};

use crate::driver::{Done, Event, Failed, Stream};

/// An op's place in its batch.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// The stream that it runs on, unless it is of the batch's first lane, which stays on the planned one.
    aside: Option<String>,
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

    /// Names of the streams beside the program's own.
    pub(super) fn streams(p: &Program) -> impl Iterator<Item = String> {
        places(p).into_values().filter_map(|place| place.aside)
    }

    /// The stream that an op runs on: the `planned` one, but for a batch's lanes beyond the first.
    pub(super) fn enter<'a>(
        &mut self,
        at: usize,
        planned: &'a Stream,
        streams: &'a BTreeMap<String, Stream>,
    ) -> Done<&'a Stream> {
        let Some(place) = self.places.get(&at) else { return Ok(planned) };
        if place.first {
            planned.record(self.began.insert(Event::new()?))?;
        }
        let Some(name) = &place.aside else { return Ok(planned) };
        let aside = streams.get(name).ok_or_else(|| Failed(format!("no stream {name}")))?;
        aside.wait(
            self.began.as_ref().ok_or_else(|| Failed(format!("a batch on {name} without a first op")))?,
        )?;
        Ok(aside)
    }

    /// After an op on the stream that [`enter`](Batches::enter) gave: what follows the last of a batch follows all of it.
    pub(super) fn leave(&mut self, at: usize, planned: &Stream, used: &Stream) -> Done<()> {
        let Some(place) = self.places.get(&at) else { return Ok(()) };
        if place.aside.is_some() {
            let ended = Event::new()?;
            used.record(&ended)?;
            self.ended.push(ended);
        }
        if place.last {
            self.ended.drain(..).try_for_each(|e| planned.wait(&e))?;
        }
        Ok(())
    }
}

fn places(p: &Program) -> BTreeMap<usize, Place> {
    let mut out = BTreeMap::new();
    // Of each batch its lanes, in order of their first op, and its last op.
    let mut batches: BTreeMap<i64, (Vec<Option<Route>>, usize)> = BTreeMap::new();
    for (at, op) in p.ops.iter().enumerate() {
        let Some(number) = batch(op) else { continue };
        let (lanes, last) = batches.entry(number).or_default();
        let (route, first) = (Route::of(op), lanes.is_empty());
        let lane = lanes.iter().position(|r| *r == route).unwrap_or_else(|| {
            lanes.push(route);
            lanes.len() - 1
        });
        let planned = p.streams.get(op.stream.0 as usize).map_or("", String::as_str);
        let aside = (lane > 0).then(|| format!("{planned} beside {lane}"));
        out.insert(at, Place { aside, first, last: false });
        *last = at;
    }
    for (_, last) in batches.values() {
        out.entry(*last).and_modify(|place: &mut Place| place.last = true);
    }
    out
}

fn batch(op: &Op) -> Option<i64> {
    op.int("batch").filter(|_| matches!(op.opcode, Opcode::Send | Opcode::Recv))
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
        let found: Vec<Option<Place>> = p.collectives().map(|(at, _)| places(&p).get(&at).cloned()).collect();
        let place =
            |aside: Option<&str>, first, last| Some(Place { aside: aside.map(String::from), first, last });
        let wanted = [
            None,
            place(None, true, false),
            place(Some("comm beside 1"), false, false),
            // The lane of the first once more: after it.
            place(None, false, true),
            place(None, true, true),
        ];
        assert_eq!(found, wanted);
        assert_eq!(Batches::streams(&p).collect::<Vec<_>>(), ["comm beside 1"]);
    }
}
