//! The modelled device: all ranks of a plan on one clock that only arithmetic moves. Time alone; no number of any
//! program is computed, so weights are not needed and a laptop holds a rack.
//!
//! [`Devices`] is told when a rank begins a program and says when it has ended. Within a rank each stream takes its ops
//! in order, an op waits for its events and for its launch, and ops that compute take turns on the device. Across ranks
//! the n-th launch on a lane meets the n-th launch of every other member; nobody leaves before the last one came. So a
//! program that would hang stands still here, and [`Devices::stalled`] says who waits for whom. Work that belongs to no
//! program, such as a decoder's, has its turn on the device like an op, and what it holds up waits.
//!
//! This room knows no plan, no model, no call and no process. It is handed programs and prices and asks nothing else; it
//! shares no code with whoever estimates the same programs, so that the two can be compared.

mod devices;
mod lanes;
mod script;

pub use devices::{Bar, Devices, Ended, Loaded, Occupied};

use tessera_base::Code;

/// A program that cannot be timed.
pub static T0810: Code = Code {
    id: "T0810",
    title: "program cannot be run on a modelled device",
    page: "The modelled device takes a program of one role as it is: each op on its stream, each wait after its issue, each \
collective over a group that the rank is a member of. One op of this program does not say so. Programs of a sealed plan \
always do, since the judge has read them; seen here, the program was changed after it was judged, or was never \
sealed. `tessera check` of the program says what is wrong with it.",
};
/// Ranks that wait for each other.
pub static T0811: Code = Code {
    id: "T0811",
    title: "ranks of a modelled run wait for each other",
    page: "Nothing runs on any device and nothing is on its way, but some ranks have ops left: each is held by a collective \
that other members of its group never join, or join with another call. On real devices this is a hang.\n\nThe message \
lists who stands where and whom it waits for. A sealed plan cannot come to this; a rank that was given another program, or \
that began fewer programs than its peers, can.",
};

/// Codes this room raises.
pub const CODES: &[&Code] = &[&T0810, &T0811];
