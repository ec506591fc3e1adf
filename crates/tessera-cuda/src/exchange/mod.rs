//! One member's end of a lane on GPUs: where collectives meet, over the memory of peers where all members are of one host and
//! can reach one another's, through NCCL where not. Both ways move the same bytes; sums are those of the CPU's collectives,
//! bit for bit in f32 but for its compensation, only over peers.
//!
//! All members call everything in the same order. Collectives of a group run one after another: they go to one stream, or
//! to streams ordered by events; groups have streams of their own, since a collective waits on the device for the other
//! members. This room is told which host it is on and how long to be patient.

mod launch;
mod moves;
mod peers;
mod targets;
mod verbs;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::compile::Compiler;
use crate::driver::{Done, Event, Failed, Memory, Stream, download, failed, upload};
use crate::libraries::Libraries;
use crate::nccl::{Comm, Ender, UniqueId};

use launch::{Head, Kernels, MOST};
use peers::{FLAGS_BYTES, Handle, Opened, Peers, TRIAL_OFFSET};
use verbs::Verbs;
use words::Words;

pub(crate) use moves::{Kind, Move, Via};
pub(crate) use targets::{Along, Targets};
pub(crate) use words::{GroupFault, Progress};

/// How members meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Over peers' memory where all can, through NCCL where not.
    Best,
    /// Over peers' memory, or not at all.
    Peers,
    /// Through NCCL.
    Nccl,
}

/// What a group is told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// How members are to meet. Where members differ, NCCL is taken.
    pub(crate) way: Way,
    /// Most blocks of a collective's kernel.
    pub(crate) blocks: u32,
    /// How long a kernel waits for peers.
    pub(crate) patience: Duration,
    /// How long the host waits for peers outside of collectives: to meet, to share, to exchange a table.
    pub(crate) setup: Duration,
    /// Names this host: two members have the same number exactly when they are of one host. 0: not known.
    pub(crate) host: u64,
    /// Memory for pieces that are packed: the most that [`staging_bytes`](Move::staging_bytes) says of any collective that
    /// goes through NCCL, where members meet in one another's memory and where they do not.
    pub(crate) staging_bytes: [usize; 2],
}

/// One member's end. After a fault it is of no further use; while work of it is stuck on the device, dropping it waits for that
/// work, so whoever gives up ends it through its [`Aborter`] first. Graphs that hold its work go before it.
#[derive(Debug)]
pub(crate) struct Group {
    me: usize,
    members: usize,
    terms: Terms,
    abort: Arc<AtomicBool>,
    peers: Option<Peers>,
    why_not_peers: Option<String>,
    /// Whether a program asks for NCCL where members could meet otherwise.
    nccl_asked: bool,
    staging: Option<Memory>,
    kernels: Kernels,
    /// None for a group of one.
    comm: Option<Comm>,
    /// Written by peers; it goes after the communicator, whose end all members reach together.
    flags: Option<Memory>,
    words: Arc<Words>,
    control: Stream,
}

/// Ends every wait of a group on this member, from any thread.
#[derive(Debug, Clone)]
pub(crate) struct Aborter {
    words: Arc<Words>,
    ender: Option<Ender>,
    abort: Arc<AtomicBool>,
}

impl Aborter {
    /// Ends waits in kernels and on the host, at once.
    pub(crate) fn stop(&self) {
        self.words.abort();
        self.abort.store(true, Ordering::Release);
    }

    /// Whether something of NCCL is to be ended too.
    pub(crate) fn through_nccl(&self) -> bool {
        self.ender.is_some()
    }

    /// Ends waits in kernels, on the host and in NCCL, now and later; whether NCCL ended in time.
    pub(crate) fn abort(&self, bound: Duration) -> bool {
        self.stop();
        self.ender.as_ref().is_none_or(|e| e.end(bound))
    }
}

impl Group {
    /// Meets the other members: blocks until all have come or the time for it is over, or until `abort` is set.
    pub(crate) fn join(
        libraries: &Libraries,
        compiler: &mut Compiler,
        id: &UniqueId,
        (me, members): (usize, usize),
        terms: Terms,
        abort: Arc<AtomicBool>,
    ) -> Done<Group> {
        if me >= members {
            return failed(format!("member {me} of {members}"));
        }
        let kernels = Kernels::new(compiler, me, members)?;
        let words = Arc::new(Words::new()?);
        let control = Stream::new(false)?;
        let comm = match members {
            1 => None,
            _ => Some(Comm::meet(libraries, id, (me, members), terms.setup, abort.clone())?),
        };
        let mut group = Group {
            me,
            members,
            terms,
            abort,
            peers: None,
            why_not_peers: None,
            nccl_asked: false,
            staging: None,
            kernels,
            comm,
            flags: None,
            words,
            control,
        };
        // NCCL connects at its first use: here, where no call waits for it.
        group.all(true)?;
        Ok(group)
    }

    /// Looks what a collective needs, before any memory is shared: how much for packed pieces, and whether NCCL.
    pub(crate) fn stage(&mut self, m: &Move) {
        let bytes = m.staging_bytes(self.me);
        let [with_peers, without] = &mut self.terms.staging_bytes;
        *without = bytes.max(*without);
        if m.via == Via::Nccl {
            *with_peers = bytes.max(*with_peers);
            self.nccl_asked = true;
        }
    }

    /// Makes this member's exchange memory visible to the others and theirs to it, or agrees with them on NCCL. The memory
    /// outlives the group.
    pub(crate) fn share(&mut self, memory: &Memory) -> Done<()> {
        let own = self.flags.insert(Memory::new(FLAGS_BYTES)?);
        self.control.zero(own.at(), own.bytes())?;
        let at = own.at();
        self.passed("its flags to be cleared")?;
        if self.members == 1 {
            let (bases, bytes, flags) = (vec![memory.at()], vec![memory.bytes() as u64], vec![at]);
            self.peers = Some(Peers { me: 0, bases, bytes, flags, opened: Vec::new() });
            return Ok(());
        }
        let mut why = None;
        let card = Card::new(memory, at, &self.terms).unwrap_or_else(|e| {
            why = Some(e.0);
            Card::default()
        });
        let cards: Vec<Card> = self.gather(&card.bytes())?.iter().map(|c| Card::read(c)).collect();
        let willing =
            self.members <= MOST && cards.iter().all(|c| c.willing && c.host != 0 && c.host == card.host);
        let opened = match willing {
            true => self.attached(&cards).map_err(|e| why = Some(e.0)).ok(),
            false => None,
        };
        // Each tells the others how far it came: all take the same way.
        let mut peers = None;
        if self.all(opened.is_some())?
            && let Some(opened) = opened
        {
            let seen = self.seen(opened, &cards, memory.at(), at);
            let tried = self.try_out(&seen, &mut why);
            if self.all(tried)? {
                peers = Some(seen);
            }
        }
        if peers.is_none() {
            let why = why.unwrap_or_else(|| "another member cannot, or is of another host".into());
            if self.terms.way == Way::Peers {
                return failed(format!("members cannot meet in one another's memory: {why}"));
            }
            self.why_not_peers = Some(why);
        }
        self.staging = match self.terms.staging_bytes[usize::from(peers.is_none())] {
            0 => None,
            bytes => Some(Memory::new(bytes)?),
        };
        self.peers = peers;
        Ok(())
    }

    /// Has member 0 of two send a word to the other, where NCCL will carry what they send. NCCL connects at the first use, and the
    /// host waits in that for the other member: in a program the two may well send to one another first. Blocks.
    pub(crate) fn connect(&self) -> Done<()> {
        let Some(comm) = self.comm.as_ref().filter(|_| self.uses_nccl()) else { return Ok(()) };
        let word = Memory::new(size_of::<u32>())?;
        word.zero()?;
        let there = [(1 - self.me, word.at(), size_of::<u32>())];
        let (sends, receives) = if self.me == 0 { (&there[..], &[][..]) } else { (&[][..], &there[..]) };
        let sent = comm.transfer(sends, receives, &self.control);
        self.over(sent, "both ends of a transfer to connect", word).map(drop)
    }

    /// How members meet, once they have shared.
    pub(crate) fn way(&self) -> Way {
        if self.peers.is_some() { Way::Peers } else { Way::Nccl }
    }

    /// Whether NCCL carries some collective, once members have shared.
    pub(crate) fn uses_nccl(&self) -> bool {
        self.way() == Way::Nccl || self.nccl_asked
    }

    /// Why members do not meet in one another's memory, where they do not.
    pub(crate) fn why_not_peers(&self) -> Option<&str> {
        self.why_not_peers.as_deref()
    }

    /// Words of every member, in order; all bring equally many. Blocks.
    pub(crate) fn table(&mut self, mine: &[u64]) -> Done<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|w| w.to_le_bytes()).collect();
        Ok(self.gather(&bytes)?.iter().map(|b| words_of(b)).collect())
    }

    /// Enqueues one collective. When what it enqueued has ended, the result is whole in this member's memory and its
    /// operand may be overwritten. It may be captured: it neither allocates nor waits for the device.
    pub(crate) fn issue(&mut self, m: &Move, stream: &Stream) -> Done<()> {
        if let Kind::Copy { to, from, .. } = &m.kind
            && (to.len() != self.members || from.len() != self.members)
        {
            return failed(format!("pieces of {} members in a group of {}", to.len(), self.members));
        }
        // A member alone has no communicator.
        if let Some(peers) = self.peers.as_ref().filter(|_| m.via != Via::Nccl || self.comm.is_none()) {
            let patience_ns = u64::try_from(self.terms.patience.as_nanos()).unwrap_or(u64::MAX);
            let means = (self.words.at(), patience_ns, self.terms.blocks);
            return peers.issue(m, &self.kernels, means, stream);
        }
        let Some(comm) = &self.comm else { return failed("a group that has not shared its memory") };
        let verbs = Verbs {
            me: self.me,
            comm,
            kernels: &self.kernels,
            words: &self.words,
            staging: self.staging.as_ref(),
            blocks: self.terms.blocks,
        };
        verbs.issue(m, stream)
    }

    /// Where a kernel that makes the operand of a collective may write it itself, between [`open`](Group::open) and
    /// [`close`](Group::close): results of all members. None through NCCL, and where pieces are no whole words.
    pub(crate) fn targets(&self, m: &Move, along: Along) -> Done<Option<Targets>> {
        self.peers.as_ref().map_or(Ok(None), |p| p.targets(m, along))
    }

    /// Enqueues the beginning of a collective whose pieces others move: from here on members' results may be written, and
    /// this member's may be written by them.
    pub(crate) fn open(&self, m: &Move, stream: &Stream) -> Done<()> {
        self.kernels.open(self.head(m)?, stream)
    }

    /// Enqueues copies of all pieces by the copy engines, between `open` and `close`.
    pub(crate) fn carry(&self, m: &Move, stream: &Stream) -> Done<()> {
        self.peers.as_ref().map_or_else(|| failed(NOT_PEERS), |p| p.carry(m, stream))
    }

    /// Enqueues the end of a collective that was opened: when it is done, all members' pieces are here.
    pub(crate) fn close(&self, m: &Move, stream: &Stream) -> Done<()> {
        self.kernels.close(self.head(m)?, stream)
    }

    fn head(&self, m: &Move) -> Done<Head> {
        let patience_ns = u64::try_from(self.terms.patience.as_nanos()).unwrap_or(u64::MAX);
        self.peers.as_ref().map_or_else(|| failed(NOT_PEERS), |p| Ok(p.head(m, self.words.at(), patience_ns)))
    }

    /// What went wrong first, if anything did. Through NCCL nobody on the device watches the time: the host compares
    /// [`progress`](Group::progress) with its own clock.
    pub(crate) fn fault(&self) -> Option<GroupFault> {
        let nccl = || {
            let (why, remote) = self.comm.as_ref()?.failure()?;
            Some(if remote { GroupFault::Remote(why) } else { GroupFault::Nccl(why) })
        };
        self.words.fault().or_else(nccl)
    }

    /// Forgets where the device was. Nothing of the group may be under way.
    pub(crate) fn rewind(&self) {
        self.words.rewind();
    }

    /// Where the device is.
    pub(crate) fn progress(&self) -> Progress {
        self.words.progress()
    }

    /// A handle that ends this group's waits from another thread.
    pub(crate) fn aborter(&self) -> Aborter {
        Aborter {
            words: self.words.clone(),
            ender: self.comm.as_ref().map(Comm::ender),
            abort: self.abort.clone(),
        }
    }

    fn attached(&self, cards: &[Card]) -> Done<Vec<[Opened; 2]>> {
        let others = cards.iter().enumerate().filter(|(j, _)| *j != self.me);
        others
            .map(|(j, card)| {
                let one = |h: &Handle| {
                    Opened::new(h).map_err(|e| Failed(format!("memory of member {j} does not open: {e}")))
                };
                Ok([one(&card.memory)?, one(&card.flags)?])
            })
            .collect()
    }

    fn seen(&self, opened: Vec<[Opened; 2]>, cards: &[Card], memory: u64, flags_at: u64) -> Peers {
        let mut bases: Vec<u64> = opened.iter().map(|o| o[0].at()).collect();
        let mut flags: Vec<u64> = opened.iter().map(|o| o[1].at()).collect();
        bases.insert(self.me, memory);
        flags.insert(self.me, flags_at);
        Peers {
            me: self.me,
            bases,
            bytes: cards.iter().map(|c| c.bytes).collect(),
            flags,
            opened: opened.into_iter().flatten().collect(),
        }
    }

    /// Writes a word into every member's flags and looks whether theirs are in its own.
    fn try_out(&mut self, peers: &Peers, why: &mut Option<String>) -> bool {
        let token = |from: usize, to: usize| 0x7e55_e7a0_0000_0000 | (from as u64) << 16 | to as u64;
        let written = (0..self.members).try_for_each(|j| {
            upload(peers.flags[j] + TRIAL_OFFSET + 8 * self.me as u64, &[token(self.me, j)])
        });
        let met = self.all(written.is_ok());
        let mut found = vec![0_u64; self.members];
        let read = download(&mut found, peers.flags[self.me] + TRIAL_OFFSET);
        let wrong = (0..self.members).find(|j| found[*j] != token(*j, self.me));
        let failure = written.err().or(met.err()).or(read.err()).map(|e| e.0);
        *why = failure.or(wrong.map(|j| format!("what member {j} writes does not arrive"))).or(why.take());
        why.is_none()
    }

    /// Whether all members say yes; also the point that all have reached.
    fn all(&mut self, mine: bool) -> Done<bool> {
        Ok(self.table(&[u64::from(mine)])?.iter().all(|w| w == &[1]))
    }

    fn gather(&mut self, mine: &[u8]) -> Done<Vec<Vec<u8>>> {
        let Some(comm) = &self.comm else { return Ok(vec![mine.to_vec()]) };
        if mine.is_empty() {
            return Ok(vec![Vec::new(); self.members]);
        }
        let (from, to) = (Memory::new(mine.len())?, Memory::new(mine.len() * self.members)?);
        upload(from.at(), mine)?;
        let gathered = comm.all_gather(from.at(), to.at(), mine.len(), &self.control);
        let (_, to) = self.over(gathered, "all members to exchange a table", (from, to))?;
        let mut out = vec![0_u8; mine.len() * self.members];
        download(&mut out, to.at())?;
        Ok(out.chunks(mine.len()).map(<[u8]>::to_vec).collect())
    }

    /// Waits until what was sent over the group's own stream has arrived, and gives back the memory that it used.
    fn over<M>(&self, sent: Done<()>, what: &str, memory: M) -> Done<M> {
        match sent.and_then(|()| self.passed(what)) {
            Ok(()) => Ok(memory),
            Err(e) => {
                // To free memory is to wait for the work that uses it, which may be stuck.
                std::mem::forget(memory);
                Err(e)
            }
        }
    }

    /// Waits until the group's own stream has passed here.
    fn passed(&self, what: &str) -> Done<()> {
        let event = Event::new()?;
        self.control.record(&event)?;
        let deadline = Instant::now() + self.terms.setup;
        while !event.passed()? {
            if self.abort.load(Ordering::Acquire) {
                return failed(format!("ended while it waited for {what}"));
            }
            if Instant::now() > deadline {
                return failed(format!("waited {} ms for {what}", self.terms.setup.as_millis()));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

const NOT_PEERS: &str = "members do not meet in one another's memory";

/// What a member tells the others of its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Card {
    host: u64,
    willing: bool,
    bytes: u64,
    memory: Handle,
    flags: Handle,
}

impl Default for Card {
    /// Of a member that cannot share.
    fn default() -> Card {
        Card { host: 0, willing: false, bytes: 0, memory: [0; 64], flags: [0; 64] }
    }
}

impl Card {
    fn new(memory: &Memory, flags: u64, terms: &Terms) -> Done<Card> {
        if terms.way == Way::Nccl {
            return failed("NCCL was asked for");
        }
        Ok(Card {
            host: terms.host,
            willing: true,
            bytes: memory.bytes() as u64,
            memory: peers::handle(memory.at())?,
            flags: peers::handle(flags)?,
        })
    }

    fn bytes(&self) -> Vec<u8> {
        let words = [self.host, u64::from(self.willing), self.bytes];
        let words = words.iter().flat_map(|w| w.to_le_bytes());
        words.chain(self.memory).chain(self.flags).collect()
    }

    fn read(bytes: &[u8]) -> Card {
        let (words, handles) = bytes.split_at(24);
        let words = words_of(words);
        let handle = |at: usize| std::array::from_fn(|i| handles[at + i]);
        Card { host: words[0], willing: words[1] == 1, bytes: words[2], memory: handle(0), flags: handle(64) }
    }
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_member_tells_of_its_memory_arrives_whole() {
        let card = Card {
            host: 7,
            willing: true,
            bytes: 1 << 33,
            memory: std::array::from_fn(|i| i as u8),
            flags: std::array::from_fn(|i| 255 - i as u8),
        };
        assert_eq!(Card::read(&card.bytes()), card);
        assert_eq!(Card::read(&Card::default().bytes()), Card::default());
    }
}
