//! What the transports need of the operating system, one file for each need. A file states what its functions promise, and
//! has an implementation for Linux and one for macOS. Those for macOS compile and were never run.

mod shared_memory;
mod wake_event;
mod word_sleep;

pub(crate) use shared_memory::{create_sealed_memory, has_size, is_sealed, memory_id};
pub(crate) use wake_event::WakeEvent;
pub(crate) use word_sleep::{sleep_while_equal, wake_sleepers};
