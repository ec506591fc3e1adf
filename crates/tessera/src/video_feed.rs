//! An input video that the launching process hands to the leader chunk by chunk, over a socket between the two.
//!
//! The leader pulls. It announces a chunk and waits until the launching process has its frames. Then it takes the changes that have
//! arrived meanwhile, and states how many frames the chunk takes: a scene's first chunk takes fewer, and only the leader
//! knows which chunk opens a scene. A pipe would hold frames that no chunk has taken, many chunks of a small model, and nobody could
//! discard them when another person takes over.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use tessera_base::Diagnostic;

use crate::codes::{T0017, T0079};
use crate::rgb::from_rgb;

/// The leader's message that announces a chunk; any other number takes so many frames.
const ANNOUNCEMENT: u32 = 0;

/// What the leader requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedRequest {
    /// A chunk follows: [`VideoFeed::confirm_chunk`] answers once its frames have arrived.
    Chunk,
    /// So many frames of the confirmed chunk, which [`VideoFeed::send_frame`] sends one by one.
    Frames(u32),
}

/// The launching process's end of the socket. Dropping it ends the video, and so the stream.
#[derive(Debug)]
pub struct VideoFeed {
    stream: UnixStream,
}

/// The leader's end of the socket, for a launch.
#[derive(Debug)]
pub struct VideoSocket(OwnedFd);

impl VideoSocket {
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl VideoFeed {
    /// Creates both ends. Programs that this process starts inherit neither.
    ///
    /// # Errors
    /// T0017.
    pub fn new() -> Result<(VideoFeed, VideoSocket), Diagnostic> {
        let pair = UnixStream::pair();
        let (here, there) = pair.map_err(|e| {
            Diagnostic::error(&T0017, format!("the socket for frames of an input video: {e}"))
        })?;
        Ok((VideoFeed { stream: here }, VideoSocket(there.into())))
    }

    /// Waits for what the leader requests next; `None` once the run has ended.
    pub fn next_request(&mut self) -> Option<FeedRequest> {
        let mut number = [0; 4];
        self.stream.read_exact(&mut number).ok()?;
        Some(match u32::from_le_bytes(number) {
            ANNOUNCEMENT => FeedRequest::Chunk,
            frames => FeedRequest::Frames(frames),
        })
    }

    /// Confirms that enough frames for the announced chunk have arrived, however many it takes, and states whether they begin a scene. Returns
    /// false once the run has ended.
    pub fn confirm_chunk(&mut self, begins_scene: bool) -> bool {
        self.stream.write_all(&[u8::from(begins_scene)]).is_ok()
    }

    /// Sends a frame of RGB [height, width, 3] in the size of the stream. Returns false once the run has ended.
    pub fn send_frame(&mut self, rgb: &[u8]) -> bool {
        self.stream.write_all(rgb).is_ok()
    }
}

/// The leader's side of the video.
#[derive(Debug)]
pub(crate) struct FeedReader {
    stream: UnixStream,
    frame_bytes: usize,
}

impl FeedReader {
    /// Wraps the descriptor that the launching process passed. A frame has so many bytes.
    pub(crate) fn from_fd(fd: OwnedFd, frame_bytes: usize) -> FeedReader {
        FeedReader { stream: fd.into(), frame_bytes }
    }

    /// Announces a chunk and waits until its frames have arrived. Returns whether they begin a scene; `None` if the video
    /// has ended.
    ///
    /// # Errors
    /// T0079 if the socket fails.
    pub(crate) fn wait_for_chunk(&mut self) -> Result<Option<bool>, Diagnostic> {
        let mut answer = [0];
        let announced = self.stream.write_all(&ANNOUNCEMENT.to_le_bytes());
        let answered = announced.and_then(|()| self.stream.read_exact(&mut answer));
        Ok(unless_ended(answered)?.map(|()| answer[0] != 0))
    }

    /// Takes the frames of the confirmed chunk as values in [−1, 1]; `None` if the video has ended.
    ///
    /// # Errors
    /// T0079 if the socket fails.
    pub(crate) fn take_frames(&mut self, frames: u32) -> Result<Option<Vec<f32>>, Diagnostic> {
        let mut rgb = vec![0; frames as usize * self.frame_bytes];
        let asked = self.stream.write_all(&frames.to_le_bytes());
        let answered = asked.and_then(|()| self.stream.read_exact(&mut rgb));
        Ok(unless_ended(answered)?.map(|()| from_rgb(&rgb).collect()))
    }
}

/// Tells the end of the video from a socket that fails.
fn unless_ended(outcome: std::io::Result<()>) -> Result<Option<()>, Diagnostic> {
    match outcome {
        Ok(()) => Ok(Some(())),
        Err(e)
            if [ErrorKind::UnexpectedEof, ErrorKind::BrokenPipe, ErrorKind::ConnectionReset]
                .contains(&e.kind()) =>
        {
            Ok(None)
        }
        Err(e) => Err(Diagnostic::error(&T0079, format!("the socket for frames of the input video: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_takes_the_frames_that_the_leader_states_and_the_rest_stays() {
        let (mut feed, socket) = VideoFeed::new().unwrap();
        let mut leader = FeedReader::from_fd(socket.into_fd(), 3);
        let launcher = std::thread::spawn(move || {
            let mut sent = 0;
            while let Some(request) = feed.next_request() {
                match request {
                    FeedRequest::Chunk if sent == 3 => return sent,
                    FeedRequest::Chunk => assert!(feed.confirm_chunk(sent == 0)),
                    FeedRequest::Frames(frames) => (0..frames).for_each(|_| {
                        sent += 1;
                        assert!(feed.send_frame(&[0, 255, sent]));
                    }),
                }
            }
            sent
        });
        assert_eq!(leader.wait_for_chunk().unwrap(), Some(true));
        assert_eq!(leader.take_frames(1).unwrap().unwrap()[..2], [-1.0, 1.0]);
        assert_eq!(leader.wait_for_chunk().unwrap(), Some(false));
        let two = leader.take_frames(2).unwrap().unwrap();
        assert_eq!([two[2], two[5]], [2.0 / 127.5 - 1.0, 3.0 / 127.5 - 1.0]);
        // The launching process has dropped its end, which ends the video and is no failure.
        assert_eq!(leader.wait_for_chunk().unwrap(), None);
        assert_eq!((launcher.join().unwrap(), leader.take_frames(1).unwrap()), (3, None));
    }
}
