//! Recordings: every frame of the stream from a start to an end, as files that the server offers for download.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tessera_base::Diagnostic;
use tessera_report::raw_video::RawFormat;

use crate::codes::T1608;

/// Most recordings that a server keeps.
const MAX_RECORDINGS: usize = 32;

/// The recordings of a server.
#[derive(Debug)]
pub(crate) struct Recorder {
    folder: PathBuf,
    /// Width and height of a frame.
    size: (u32, u32),
    /// Frames per second, as a fraction.
    rate: (u32, u32),
    /// Most bytes of one recording.
    max_bytes: u64,
    finished: Vec<Recording>,
    open: Option<OpenRecording>,
}

/// What a client learns of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Recording {
    /// Number among those of the server, from 1.
    pub(crate) number: usize,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    /// Whether frames are added still.
    pub(crate) is_open: bool,
    /// Why it ended by itself.
    pub(crate) ended_by: Option<String>,
}

#[derive(Debug)]
struct OpenRecording {
    about: Recording,
    file: BufWriter<File>,
}

impl Recorder {
    /// Keeps recordings in a folder, which the first one creates.
    pub(crate) fn new(folder: &Path, size: (u32, u32), rate: (u32, u32), max_bytes: u64) -> Recorder {
        Recorder { folder: folder.to_path_buf(), size, rate, max_bytes, finished: Vec::new(), open: None }
    }

    /// Starts a recording with the next frame.
    ///
    /// # Errors
    /// T1608 if one is open already, there are too many, or the file cannot be created.
    pub(crate) fn start(&mut self) -> Result<Recording, Diagnostic> {
        if let Some(open) = &self.open {
            let message = format!("recording {} is open", open.about.number);
            return Err(Diagnostic::error(&T1608, message).with_hint("stop it first"));
        }
        let number = self.finished.len() + 1;
        if number > MAX_RECORDINGS {
            let message = format!("there are {MAX_RECORDINGS} recordings");
            return Err(
                Diagnostic::error(&T1608, message).with_hint("download them and start the server again")
            );
        }
        let create = || {
            std::fs::create_dir_all(&self.folder)?;
            let file = OpenOptions::new().write(true).create_new(true).open(self.path(number))?;
            let mut file = BufWriter::new(file);
            let header = RawFormat::Y4m.header(self.size, self.rate);
            file.write_all(&header)?;
            Ok((file, header.len() as u64))
        };
        let (file, bytes) = create().map_err(|e: std::io::Error| {
            Diagnostic::error(&T1608, format!("{}: {e}", self.path(number).display()))
        })?;
        let about = Recording { number, frames: 0, bytes, is_open: true, ended_by: None };
        self.open = Some(OpenRecording { about: about.clone(), file });
        Ok(about)
    }

    /// Ends the open recording.
    ///
    /// # Errors
    /// T1608 if none is open.
    pub(crate) fn stop(&mut self) -> Result<Recording, Diagnostic> {
        self.close(None).ok_or_else(|| Diagnostic::error(&T1608, "no recording is open"))
    }

    /// Adds a frame to the open recording, which ends if the disk or its limit does not allow it.
    pub(crate) fn add_frame(&mut self, rgb: &[u8]) {
        let Some(open) = &mut self.open else { return };
        let bytes = RawFormat::Y4m.encode_frame(rgb);
        if open.about.bytes + bytes.len() as u64 > self.max_bytes {
            self.close(Some(format!("the limit of {} bytes", self.max_bytes)));
            return;
        }
        match open.file.write_all(&bytes) {
            Ok(()) => {
                open.about.frames += 1;
                open.about.bytes += bytes.len() as u64;
            }
            Err(e) => {
                self.close(Some(e.to_string()));
            }
        }
    }

    /// Whether frames are added to a recording.
    pub(crate) fn is_recording(&self) -> bool {
        self.open.is_some()
    }

    /// Returns all recordings, oldest first.
    pub(crate) fn list(&self) -> Vec<Recording> {
        let open = self.open.as_ref().map(|open| &open.about);
        self.finished.iter().chain(open).cloned().collect()
    }

    /// Returns the file of a recording that has ended.
    pub(crate) fn finished_file(&self, number: usize) -> Option<PathBuf> {
        self.finished.iter().find(|r| r.number == number).map(|_| self.path(number))
    }

    fn close(&mut self, why: Option<String>) -> Option<Recording> {
        let OpenRecording { about, mut file } = self.open.take()?;
        let flushed = file.flush().err().map(|e| e.to_string());
        let about = Recording { is_open: false, ended_by: why.or(flushed), ..about };
        self.finished.push(about.clone());
        Some(about)
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.join(format!("recording-{number}.y4m"))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.close(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_holds_every_frame_between_its_ends() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::new(&dir.path().join("made"), (4, 2), (24, 1), 10_000);
        recorder.add_frame(&[0; 24]);
        assert!(recorder.stop().unwrap_err().message.contains("no recording"));
        assert_eq!(recorder.start().unwrap().number, 1);
        assert!(recorder.start().is_err() && recorder.finished_file(1).is_none());
        (0..3).for_each(|_| recorder.add_frame(&[90; 24]));
        let about = recorder.stop().unwrap();
        assert_eq!((about.frames, about.is_open, about.ended_by), (3, false, None));
        let bytes = std::fs::read(recorder.finished_file(1).unwrap()).unwrap();
        assert_eq!(bytes.len() as u64, about.bytes);
        assert!(bytes.starts_with(b"YUV4MPEG2 W4 H2 F24:1"));
        assert_eq!(bytes.windows(5).filter(|w| w == b"FRAME").count(), 3);
    }

    #[test]
    fn a_recording_ends_at_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::new(dir.path(), (4, 2), (24, 1), 150);
        recorder.start().unwrap();
        (0..20).for_each(|_| recorder.add_frame(&[90; 24]));
        let list = recorder.list();
        assert!(!recorder.is_recording() && list[0].bytes <= 150 && list[0].frames > 0);
        assert!(list[0].ended_by.as_deref().is_some_and(|why| why.contains("limit")));
    }
}
