//! Writes uncompressed frames to a pipe, a file or standard output, for another program.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
pub use tessera_report::raw_video::RawFormat;

use crate::codes::{T0042, T0043, T0044};
use crate::files::{refuse_existing, write_error};
use crate::system::descriptor_path;

/// Number of bytes for which a pipe that polls as writable always has room on Linux, so that no
/// write blocks and the limit of a stalled reader holds.
const WRITE_BYTES: usize = 4096;

/// A stream of uncompressed frames and its destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameTarget {
    /// Format of the frames.
    pub format: RawFormat,
    /// Where they go.
    pub to: FrameDestination,
}

/// A destination of uncompressed frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FrameDestination {
    /// Standard output of the command.
    Stdout,
    /// A file descriptor that the command inherited.
    Descriptor(u32),
    /// A new file, or an existing named pipe or device.
    Path(PathBuf),
}

impl FrameDestination {
    /// Parses `-`, `fd:N` or a path. `None` if the number of a descriptor is invalid.
    #[must_use]
    pub fn parse(text: &str) -> Option<FrameDestination> {
        Some(match (text, text.strip_prefix("fd:")) {
            ("-", _) | (_, Some("1")) => FrameDestination::Stdout,
            (_, Some(number)) => FrameDestination::Descriptor(number.parse().ok()?),
            ("", _) => return None,
            _ => FrameDestination::Path(PathBuf::from(text)),
        })
    }

    /// Returns the destination as it is written on the command line, with an absolute path.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self {
            FrameDestination::Stdout => "-".into(),
            FrameDestination::Descriptor(number) => format!("fd:{number}"),
            FrameDestination::Path(path) => {
                std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string()
            }
        }
    }

    /// Opens the destination. Opening a named pipe waits for its reader.
    ///
    /// # Errors
    /// T0013 for an existing file, T0014, or T0044.
    pub(crate) fn open(&self) -> Result<OwnedFd, Diagnostic> {
        let refuse =
            |why: String| Diagnostic::error(&T0044, format!("frames cannot go to {}: {why}", self.to_text()));
        match self {
            FrameDestination::Stdout if std::io::stdout().is_terminal() => {
                Err(refuse("standard output is a terminal".into())
                    .with_hint("pipe it into a program, or name a file"))
            }
            FrameDestination::Stdout => {
                let stdout = std::io::stdout();
                stdout.as_fd().try_clone_to_owned().map_err(|e| refuse(e.to_string()))
            }
            FrameDestination::Descriptor(number) => {
                let file = OpenOptions::new().append(true).open(descriptor_path(*number)).map_err(|e| {
                    refuse(e.to_string()).with_hint(
                        "open the descriptor for the command, as in 3> >(ffplay …), or use a named pipe",
                    )
                })?;
                Ok(file.into())
            }
            FrameDestination::Path(path) => open_path(path),
        }
    }
}

/// Creates a file, or opens a named pipe or a device. A file or folder that exists is kept.
fn open_path(path: &Path) -> Result<OwnedFd, Diagnostic> {
    let is_kept = std::fs::metadata(path).is_ok_and(|m| m.is_file() || m.is_dir());
    if is_kept || path.metadata().is_err() {
        refuse_existing(path)?;
    }
    let is_new = path.metadata().is_err();
    let file = OpenOptions::new().write(true).create_new(is_new).open(path);
    Ok(file.map_err(|e| write_error(path, &e))?.into())
}

/// An open destination, and the state of its stream.
pub(crate) struct FramePipe {
    format: RawFormat,
    out: File,
    /// Destination as the user named it.
    to: String,
    /// Maximum time for which the reader may take nothing.
    patience: Duration,
    frames: u64,
}

impl FramePipe {
    /// Takes an open destination and writes the header of its format.
    ///
    /// # Errors
    /// As [`FramePipe::write_frame`].
    pub(crate) fn start(
        target: &FrameTarget,
        out: OwnedFd,
        (size, fps): ((u32, u32), (u32, u32)),
        patience: Duration,
    ) -> Result<FramePipe, Diagnostic> {
        let to = target.to.to_text();
        let mut pipe = FramePipe { format: target.format, out: out.into(), to, patience, frames: 0 };
        pipe.write_bytes(&target.format.header(size, fps))?;
        Ok(pipe)
    }

    /// Writes a frame, given as bytes of RGB, and waits until the reader has made room for it.
    ///
    /// # Errors
    /// T0043 if the reader closed the pipe, T0042 if it takes nothing, or T0014.
    pub(crate) fn write_frame(&mut self, rgb: &[u8]) -> Result<(), Diagnostic> {
        let bytes = self.format.encode_frame(rgb);
        self.write_bytes(&bytes)?;
        self.frames += 1;
        Ok(())
    }

    fn write_bytes(&mut self, mut rest: &[u8]) -> Result<(), Diagnostic> {
        let mut last_progress = Instant::now();
        while !rest.is_empty() {
            if !self.wait_for_room(last_progress)? {
                return Err(self.stalled_error());
            }
            match self.out.write(&rest[..rest.len().min(WRITE_BYTES)]) {
                Ok(written) => {
                    rest = &rest[written..];
                    last_progress = Instant::now();
                }
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(e) if e.kind() == ErrorKind::BrokenPipe => return Err(self.closed_error()),
                Err(e) => return Err(write_error(Path::new(&self.to), &e)),
            }
        }
        Ok(())
    }

    /// Waits until the destination takes bytes. Returns false if the reader's time is over.
    fn wait_for_room(&self, last_progress: Instant) -> Result<bool, Diagnostic> {
        loop {
            let left = self.patience.saturating_sub(last_progress.elapsed());
            let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match poll(&mut [PollFd::new(&self.out, PollFlags::OUT)], Some(&limit)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(write_error(Path::new(&self.to), &e.into())),
            }
        }
    }

    fn closed_error(&self) -> Diagnostic {
        let message =
            format!("the reader of the frames at {} closed its end after {} frames", self.to, self.frames);
        Diagnostic::error(&T0043, message)
            .with_hint("find out why that program ended; the run folder holds everything up to here")
    }

    fn stalled_error(&self) -> Diagnostic {
        let seconds = self.patience.as_secs_f64();
        let message = format!(
            "the reader of the frames at {} has taken nothing for {seconds:.1} s, after {} frames",
            self.to, self.frames
        );
        Diagnostic::error(&T0042, message)
            .with_hint("find out what that program waits for, or write the frames to a file")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Returns a pipe with a patience of 0.2 s, and its reading end.
    fn short_pipe(format: RawFormat) -> (FramePipe, File) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let target = FrameTarget { format, to: FrameDestination::Descriptor(7) };
        let pipe = FramePipe::start(&target, writer, ((5, 3), (16, 1)), Duration::from_millis(200));
        (pipe.unwrap(), reader.into())
    }

    #[test]
    fn frames_larger_than_the_pipe_reach_a_slow_reader_in_order() {
        let (mut pipe, mut reader) = short_pipe(RawFormat::Rgb24);
        let frame: Vec<u8> = (0..200_003_u32).map(|i| (i * 7 % 251) as u8).collect();
        let sent = frame.clone();
        let writer = std::thread::spawn(move || {
            pipe.write_frame(&sent).unwrap();
            pipe.write_frame(&sent).unwrap();
        });
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        writer.join().unwrap();
        assert!(read == [&frame[..], &frame].concat());
    }

    #[test]
    fn a_reader_that_is_gone_and_one_that_stalls_have_their_own_codes() {
        let (mut pipe, reader) = short_pipe(RawFormat::Y4m);
        pipe.write_frame(&[9; 45]).unwrap();
        drop(reader);
        let gone = pipe.write_frame(&[9; 45]).unwrap_err();
        assert_eq!(gone.code, &T0043);
        assert!(gone.message.contains("fd:7") && gone.message.contains("after 1 frames"), "{}", gone.message);

        let (mut pipe, _reader) = short_pipe(RawFormat::Rgb24);
        let stalled = pipe.write_frame(&vec![0; 1 << 20]).unwrap_err();
        assert_eq!(stalled.code, &T0042);
        assert!(stalled.message.contains("0.2 s"), "{}", stalled.message);
    }

    #[test]
    fn a_file_is_created_and_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("frames.rgb");
        let to = FrameDestination::parse(path.to_str().unwrap()).unwrap();
        drop(to.open().unwrap());
        assert_eq!(to.open().unwrap_err().code.id, "T0013");
        assert!(FrameDestination::Path("/dev/null".into()).open().is_ok());
        assert_eq!(FrameDestination::Path("/nowhere/at/all".into()).open().unwrap_err().code.id, "T0014");
        let closed = FrameDestination::Descriptor(987).open().unwrap_err();
        assert_eq!(closed.code, &T0044);
    }

    #[test]
    fn destinations_are_parsed() {
        use FrameDestination::{Descriptor, Path, Stdout};
        let parse = FrameDestination::parse;
        assert_eq!([parse("-"), parse("fd:1")], [Some(Stdout), Some(Stdout)]);
        assert_eq!(parse("fd:3"), Some(Descriptor(3)));
        assert_eq!(parse("./fd:x"), Some(Path("./fd:x".into())));
        assert_eq!([parse("fd:"), parse("fd:-1"), parse("fd:x"), parse("")], [None, None, None, None]);
    }
}
