//! The socket between the launching process and the leader, on which calls and outputs of array programs travel as
//! frames of the wire protocol.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use tessera_base::Diagnostic;
use tessera_runtime::wire::{HEADER_BYTES, LAUNCHER, Message, decode_body, decode_header, encode};

use crate::codes::{T0017, T0092};

/// One end of the socket. A read or a write waits for the process at the other end: the launcher and the tripwires of
/// the lockstep limit that wait, and both end the processes, which closes the socket.
#[derive(Debug)]
pub(super) struct ArrayLink {
    stream: UnixStream,
    /// The origin of this process in the frames that it sends.
    origin: u32,
    /// The origin of the frames that it receives.
    peer: u32,
}

impl ArrayLink {
    /// Creates the socket. Returns the launching process's end, and the descriptor of the leader's.
    ///
    /// # Errors
    /// T0017.
    pub(super) fn pair() -> Result<(ArrayLink, OwnedFd), Diagnostic> {
        let (here, there) = UnixStream::pair()
            .map_err(|e| Diagnostic::error(&T0017, format!("the socket to the leader: {e}")))?;
        Ok((ArrayLink { stream: here, origin: LAUNCHER, peer: 0 }, there.into()))
    }

    /// Wraps the leader's end.
    pub(super) fn of_leader(fd: OwnedFd) -> ArrayLink {
        ArrayLink { stream: fd.into(), origin: 0, peer: LAUNCHER }
    }

    /// Returns a second handle to the same end.
    ///
    /// # Errors
    /// T0017.
    pub(super) fn try_clone(&self) -> Result<ArrayLink, Diagnostic> {
        let stream = self.stream.try_clone();
        let stream = stream.map_err(|e| Diagnostic::error(&T0017, format!("the socket of calls: {e}")))?;
        Ok(ArrayLink { stream, ..*self })
    }

    /// Encodes a message.
    ///
    /// # Errors
    /// T0703 or T0706 if it exceeds a limit of the wire protocol.
    pub(super) fn encode(&self, message: &Message) -> Result<Vec<u8>, Diagnostic> {
        encode(self.origin, message)
    }

    /// Sends an encoded message.
    ///
    /// # Errors
    /// T0092 if the other end is closed.
    pub(super) fn send(&mut self, frame: &[u8]) -> Result<(), Diagnostic> {
        self.stream.write_all(frame).map_err(|e| link_error(&e))
    }

    /// Receives the next message; `None` if the other end closed the socket after its last message.
    ///
    /// # Errors
    /// T0092 if the socket breaks within a message, and T0701 to T0706 for bytes that are no message of the peer.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, Diagnostic> {
        let mut header = [0; HEADER_BYTES];
        if !self.read_header(&mut header)? {
            return Ok(None);
        }
        let header = decode_header(&header)?;
        if header.origin != self.peer {
            let what = format!("a message of {} arrived on the socket of {}", header.origin, self.peer);
            return Err(Diagnostic::error(&T0092, what));
        }
        let mut body = vec![0; header.body_bytes()];
        self.stream.read_exact(&mut body).map_err(|e| link_error(&e))?;
        decode_body(&header, &body).map(Some)
    }

    /// Tells the other end that no further message follows.
    pub(super) fn finish_sending(&self) {
        // A socket that is closed already needs no further end.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// Reads a header. Returns whether the socket holds one.
    fn read_header(&mut self, header: &mut [u8; HEADER_BYTES]) -> Result<bool, Diagnostic> {
        let first = loop {
            match self.stream.read(header) {
                Ok(0) => return Ok(false),
                Ok(count) => break count,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(e) => return Err(link_error(&e)),
            }
        };
        self.stream.read_exact(&mut header[first..]).map_err(|e| link_error(&e))?;
        Ok(true)
    }
}

fn link_error(e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0092, format!("the socket between the launching process and the leader: {e}"))
}

#[cfg(test)]
mod tests {
    use tessera_runtime::wire::{ArrayCall, ArrayOutputs, MAX_TENSOR_BYTES, Tensor, Tensors};

    use super::*;

    #[test]
    fn messages_arrive_whole_and_the_end_is_seen() {
        let (mut here, there) = ArrayLink::pair().unwrap();
        let mut leader = ArrayLink::of_leader(there);
        let inputs = Tensors(vec![Tensor::from_f32("array.f.x", &[3], &[1.0, 2.0, 3.0]).unwrap()]);
        let call =
            Message::ArrayCall(ArrayCall { number: 1, program: "array.f".into(), inputs: inputs.clone() });
        let frame = here.encode(&call).unwrap();
        here.send(&frame).unwrap();
        assert_eq!(leader.receive().unwrap(), Some(call));
        let outputs =
            Message::ArrayOutputs(ArrayOutputs { number: 1, op_times: Vec::new(), outputs: inputs });
        let frame = leader.encode(&outputs).unwrap();
        leader.send(&frame).unwrap();
        assert_eq!(here.receive().unwrap(), Some(outputs));
        here.finish_sending();
        assert_eq!(leader.receive().unwrap(), None);
        // A frame that ends early is no end.
        leader.send(&frame[..frame.len() - 1]).unwrap();
        drop(leader);
        assert_eq!(here.receive().unwrap_err().code.id, "T0092");
    }

    #[test]
    fn messages_of_another_version_and_over_the_limit_are_refused() {
        let (mut here, there) = ArrayLink::pair().unwrap();
        let mut leader = ArrayLink::of_leader(there);
        let mut frame = leader.encode(&Message::Finished).unwrap();
        frame[4] ^= 1;
        leader.send(&frame).unwrap();
        assert_eq!(here.receive().unwrap_err().code.id, "T0701");
        let bytes = vec![0; MAX_TENSOR_BYTES as usize + 4];
        let tensor =
            Tensor::new("x", tessera_runtime::wire::Dtype::U8, &[bytes.len() as u64], bytes).unwrap();
        let call = ArrayCall { number: 1, program: "array.f".into(), inputs: Tensors(vec![tensor]) };
        assert_eq!(here.encode(&Message::ArrayCall(call)).unwrap_err().code.id, "T0703");
    }
}
