//! What the drivers need of the operating system, one file for each need. A file states what its functions promise, and has
//! an implementation for Linux and one for macOS. Those for macOS compile and were never run.

mod parent_death;
mod process_end;
mod sockets;
mod wake_event;

pub(super) use parent_death::ParentTie;
pub(super) use process_end::watch_process;
pub(super) use sockets::{RECEIVE_FLAGS, SEND_FLAGS, close_on_exec, limit_unanswered};
pub(super) use wake_event::WakeEvent;
