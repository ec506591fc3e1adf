//! Leaving in bounded time, whatever the engine's libraries do on the way out.

use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

/// Ends the process with this status. If the exit handlers of a library hang, the process kills itself.
pub fn exit(status: i32) -> ! {
    kill_self_after(Duration::from_millis(300));
    std::process::exit(status)
}

/// From now on the process lives at most `limit`, then exits with `status`.
pub(crate) fn exit_within(limit: Duration, status: i32) {
    // A thread that cannot be spawned leaves a process that is about to exit anyway.
    let _ = std::thread::Builder::new().name("exit".into()).spawn(move || {
        std::thread::sleep(limit);
        exit(status)
    });
}

fn kill_self_after(limit: Duration) {
    let _ = std::thread::Builder::new().name("backstop".into()).spawn(move || {
        std::thread::sleep(limit);
        let _ = kill_process(getpid(), Signal::KILL);
    });
}
