//! Writes the messages that a rank sends into a file of its run directory, as the frames of the
//! wire.

use std::fs::{File, create_dir_all};
use std::io::Write;
use std::path::{Path, PathBuf};

use tessera_base::Diagnostic;
use tessera_runtime::driver::{Interceptor, MessageDirection};
use tessera_runtime::wire::encode;

use crate::files::write_error;

/// Folder of the dumps in a run directory; each rank writes `rank-N.bin`.
pub const WIRE_DIR: &str = "wire";

/// Returns the path of a rank's dump.
pub(crate) fn dump_path(run_dir: &Path, rank: u32) -> PathBuf {
    run_dir.join(WIRE_DIR).join(format!("rank-{rank}.bin"))
}

/// Returns an interceptor that writes every sent message as one frame to the file, in order; a
/// broadcast has one frame per peer. `inner` alters the messages first.
///
/// # Errors
/// T0014 if the file cannot be created. The interceptor fails with T0014 if it cannot be written.
pub(crate) fn dump_sent_messages(
    path: PathBuf,
    rank: u32,
    mut inner: Option<Interceptor>,
) -> Result<Interceptor, Diagnostic> {
    if let Some(folder) = path.parent() {
        create_dir_all(folder).map_err(|e| write_error(folder, &e))?;
    }
    let mut file = File::create_new(&path).map_err(|e| write_error(&path, &e))?;
    Ok(Box::new(move |direction, peer, message| {
        let messages = match &mut inner {
            Some(inner) => inner(direction, peer, message)?,
            None => vec![message],
        };
        if direction == MessageDirection::Outbound {
            for message in &messages {
                file.write_all(&encode(rank, message)?).map_err(|e| write_error(&path, &e))?;
            }
        }
        Ok(messages)
    }))
}
