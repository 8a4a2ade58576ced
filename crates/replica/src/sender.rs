//! The primary's end of the stream: checkpoints out, acknowledgements in.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::files::FileIdentity;
use hotspare_image::memory::PageOwner;
use hotspare_image::{Epoch, Position, SharedBytes, Term};

use crate::bases::PAGE;
use crate::frame::{
    FLAG_REMEMBER, Frame, FrameBuffer, FrameError, FrameReader, Kind, PAYLOAD_BYTES_MAX,
};
use crate::kept::{Digest, DigestKey, Told};
use crate::message::{
    CheckpointBegin, CheckpointEnd, Goodbye, GoodbyeCode, MemberEntry, SwitchoverOffer, open,
    open_packet, seal, seal_packet,
};
use crate::pages::{
    Body, Effort, EncodeCounts, PAGES_PER_FRAME_MAX, PageEncoder, PageRun, RUNS_PER_FRAME_MAX,
    encode_discard_runs, encode_zero_runs,
};
use crate::staging::chain;

/// Most bytes of a [`FileIdentity`] on the wire, its path apart.
const FILE_BYTES_MAX: usize = 128;

/// Proof that a spare has everything up to a position. Only the reader of its acknowledgements
/// makes one, and on the spare itself what checks the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Committed(pub(crate) Position);

impl Committed {
    /// How far.
    #[must_use]
    pub fn position(self) -> Position {
        self.0
    }
}

/// Pages of one owner, copied out of the guest; shared by the senders of several spares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageBatch {
    owner: PageOwner,
    runs: Vec<PageRun>,
    /// Whole pages.
    pieces: Vec<SharedBytes>,
}

impl PageBatch {
    /// The pages of `runs`, one after another in `bytes`. `None` if the lengths disagree or an
    /// address is not page aligned.
    #[must_use]
    pub fn new(owner: PageOwner, runs: Vec<PageRun>, bytes: Vec<u8>) -> Option<PageBatch> {
        let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        let aligned = runs.iter().all(|run| run.first.is_multiple_of(PAGE as u64) && run.pages > 0);
        let fits = pages.checked_mul(PAGE as u64) == Some(bytes.len() as u64);
        let pieces = vec![bytes.into()];
        (aligned && fits).then_some(PageBatch { owner, runs, pieces })
    }

    /// Pages at their addresses. `None` if they are no whole pages, or not at such an address.
    #[must_use]
    pub fn of(owner: PageOwner, pages: Vec<(u64, SharedBytes)>) -> Option<PageBatch> {
        let run = |(first, bytes): &(u64, SharedBytes)| {
            let whole = bytes.len().is_multiple_of(PAGE) && first.is_multiple_of(PAGE as u64);
            let pages = u32::try_from(bytes.len() / PAGE).ok().filter(|pages| *pages > 0);
            Some(PageRun { first: *first, pages: pages.filter(|_| whole)? })
        };
        let runs = pages.iter().map(run).collect::<Option<_>>()?;
        let pieces = pages.into_iter().map(|(_, bytes)| bytes).collect();
        Some(PageBatch { owner, runs, pieces })
    }

    /// Whose.
    #[must_use]
    pub fn owner(&self) -> PageOwner {
        self.owner
    }

    /// Which pages.
    #[must_use]
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// Each page.
    pub fn pages(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().flat_map(|piece| piece.chunks_exact(PAGE))
    }

    /// How many bytes they have.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).sum()
    }
}

/// When to spend time on compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Compression {
    /// Never; zero pages are still not sent.
    Off,
    /// When the link, as measured, is slower than compressing.
    #[default]
    Adaptive,
    /// Always.
    Always,
}

/// Why nothing can be sent any more.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("the stream to the spare is broken: {0}")]
pub struct Broken(pub String);

enum Job {
    Begin(CheckpointBegin),
    Pages(Arc<PageBatch>),
    ZeroRuns(PageOwner, Arc<Vec<PageRun>>),
    DiscardRuns(PageOwner, Arc<Vec<PageRun>>),
    Bytes(Kind, Arc<Vec<u8>>),
    End(Position, Option<u64>),
    Output(Epoch, Box<[u8]>),
    Kept(DigestKey, Vec<Digest>),
    Small(Kind, Vec<u8>),
    Close,
}

impl Job {
    fn cost(&self) -> usize {
        64 + match self {
            Job::Pages(batch) => batch.byte_count() + batch.runs.len() * 16,
            Job::ZeroRuns(_, runs) | Job::DiscardRuns(_, runs) => runs.len() * 16,
            Job::Bytes(_, bytes) => bytes.len(),
            Job::Small(_, bytes) => bytes.len(),
            Job::Output(_, packet) => packet.len(),
            // No page waits for room that a spare fills with what it has.
            Job::Kept(..) | Job::Begin(_) | Job::End(..) | Job::Close => 0,
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Goes first: clients wait for it.
    urgent: VecDeque<Job>,
    bytes: usize,
    broken: Option<Broken>,
    /// Nobody waits for room any more.
    given_up: bool,
    closing: bool,
    /// Last position given to the writer.
    sent: Position,
    /// Ends of checkpoints that have not been acknowledged.
    unanswered: VecDeque<Position>,
    acknowledged: Option<Committed>,
    kept: Told,
    stats: SendStats,
}

struct Shared {
    queue: Mutex<Queue>,
    limit_bytes: usize,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it holds the lock, so a poisoned queue is still whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands what a spare has kept to who encodes pages for it.
    fn learn(&self, frame: &Frame<'_>) -> Result<(), FrameError> {
        let mut queue = self.lock();
        let (key, digests) = queue.kept.take(frame)?;
        queue.urgent.push_back(Job::Kept(key, digests.to_vec()));
        drop(queue);
        self.changed.notify_all();
        Ok(())
    }

    fn fail(&self, why: String) {
        let mut queue = self.lock();
        queue.broken.get_or_insert(Broken(why));
        queue.jobs.clear();
        queue.urgent.clear();
        queue.bytes = 0;
        drop(queue);
        self.changed.notify_all();
    }
}

/// What was sent, for status lines and benches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SendStats {
    /// Bytes on the wire (before TLS).
    pub wire_bytes: u64,
    /// Bytes of pages before encoding.
    pub page_bytes: u64,
    /// How the pages were encoded; zero and discard runs are not counted.
    pub pages: EncodeCounts,
    /// Time spent encoding.
    pub encode_time: Duration,
    /// Time spent writing, waiting for the link included.
    pub write_time: Duration,
    /// Bytes waiting.
    pub queued_bytes: usize,
}

/// Sends to one spare. Calls put work into a queue that is bounded in bytes and block while it is
/// full; a thread of the agent's runs [`Writer::run`]. Never called while the guest is stopped
/// except with room to spare, see [`Sender::room_bytes`].
///
/// Dropping it says goodbye: an abrupt end would look like the agent's death, and the spare would
/// take over.
pub struct Sender {
    shared: Arc<Shared>,
}

/// Sends packets to one spare, from any thread, and never waits. Ends nothing when dropped.
pub struct PacketSender {
    shared: Arc<Shared>,
}

impl PacketSender {
    /// Queues a packet as [`Sender::packet`] does, if there is room beyond what the queue is meant
    /// to hold; `false` if the stream has ended.
    pub fn offer(&self, packet: &Arc<Vec<u8>>) -> bool {
        let job = Job::Bytes(Kind::Packet, packet.clone());
        let mut queue = self.shared.lock();
        if queue.broken.is_some() || queue.closing {
            return false;
        }
        if queue.bytes < self.shared.limit_bytes.saturating_mul(2) {
            queue.bytes += job.cost();
            queue.jobs.push_back(job);
            drop(queue);
            self.shared.changed.notify_all();
        }
        true
    }

    /// The spare counts as dead: whoever waits for room in the queue is let go, and nobody waits
    /// from now on. A host that died does not even close its connection, and the kernel tells only
    /// after many seconds.
    pub fn give_up(&self) {
        self.shared.lock().given_up = true;
        self.shared.changed.notify_all();
    }

    /// Queues a packet of the guest, which leaves through the spare when that has checkpoint
    /// `epoch`, before all else that waits. Without room it is lost, as on any network.
    pub fn output(&self, epoch: Epoch, packet: &[u8]) {
        let job = Job::Output(epoch, packet.into());
        let mut queue = self.shared.lock();
        let is_full = queue.bytes >= self.shared.limit_bytes.saturating_mul(2);
        if queue.broken.is_some() || queue.closing || is_full {
            return;
        }
        queue.bytes += job.cost();
        queue.urgent.push_back(job);
        drop(queue);
        self.shared.changed.notify_all();
    }
}

/// The three parts of the primary's end, for three places: whoever makes checkpoints, a writing
/// thread, a reading thread. `limit_bytes` bounds what waits to be sent.
pub fn sender<W: Write, R: Read>(
    write: W,
    read: R,
    limit_bytes: usize,
    compression: Compression,
) -> (Sender, Writer<W>, ReplyReader<R>) {
    let shared = Arc::new(Shared {
        queue: Mutex::new(Queue::default()),
        limit_bytes,
        changed: Condvar::new(),
    });
    let writer = Writer {
        stream: write,
        shared: shared.clone(),
        encoder: PageEncoder::default(),
        beside: Vec::new(),
        buffer: FrameBuffer::default(),
        full: false,
        frames: 0,
        hash: 0,
        pace: Pace::new(compression),
        stats: SendStats::default(),
    };
    let replies =
        ReplyReader { stream: read, frames: FrameReader::default(), shared: shared.clone() };
    (Sender { shared }, writer, replies)
}

impl Sender {
    /// Starts a checkpoint.
    pub fn begin(&self, position: Position, term: Term, full: bool) -> Result<(), Broken> {
        self.push(Job::Begin(CheckpointBegin { position, term, full }))
    }

    /// Sends pages; allowed from [`Sender::begin`] on, also while the guest runs (pre-copy). A page
    /// sent again replaces the one before.
    pub fn pages(&self, batch: Arc<PageBatch>) -> Result<(), Broken> {
        self.push(Job::Pages(batch))
    }

    /// Says that pages are zero, without looking at them.
    pub fn zero_runs(&self, owner: PageOwner, runs: Arc<Vec<PageRun>>) -> Result<(), Broken> {
        self.push(Job::ZeroRuns(owner, runs))
    }

    /// Says that pages have nothing of their own any more: of what was sent of them before, nothing
    /// counts; what is sent after it does.
    pub fn discard_runs(&self, owner: PageOwner, runs: Arc<Vec<PageRun>>) -> Result<(), Broken> {
        self.push(Job::DiscardRuns(owner, runs))
    }

    /// Sends (a piece of) the checkpoint's state.
    pub fn state(&self, bytes: Arc<Vec<u8>>) -> Result<(), Broken> {
        self.push(Job::Bytes(Kind::State, bytes))
    }

    /// Sends (a piece of) the epoch's file changes.
    pub fn file_changes(&self, bytes: Arc<Vec<u8>>) -> Result<(), Broken> {
        self.push(Job::Bytes(Kind::FileChanges, bytes))
    }

    /// Names files that the spare must have alike. It compares them before it acknowledges a
    /// checkpoint that ends after this.
    pub fn files(&self, identities: &[FileIdentity]) -> Result<(), Broken> {
        let mut rest = identities;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |one: &&FileIdentity| {
                bytes += one.path.len() + FILE_BYTES_MAX;
                bytes <= PAYLOAD_BYTES_MAX
            };
            // A path has at most 4096 bytes, so one always fits.
            let (some, others) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            self.small(Kind::Files, &some)?;
            rest = others;
        }
        Ok(())
    }

    /// Ends the checkpoint. It is committed when the [`ReplyReader`] says so. `inputs` is the last
    /// packet of this spare that it covers.
    pub fn end(&self, position: Position, inputs: Option<u64>) -> Result<(), Broken> {
        self.push_sent(Job::End(position, inputs), Some(position))
    }

    /// Makes the checkpoint under way void.
    pub fn abort(&self, position: Position) -> Result<(), Broken> {
        self.small(Kind::Abort, &position)
    }

    /// Sends a record of the event log; `position` is what the spare has once it has it.
    pub fn event(&self, position: Position, record: Arc<Vec<u8>>) -> Result<(), Broken> {
        self.push_sent(Job::Bytes(Kind::Event, record), Some(position))
    }

    /// A way for packets that other threads can use.
    #[must_use]
    pub fn packets(&self) -> PacketSender {
        PacketSender { shared: self.shared.clone() }
    }

    /// Sends a packet, after everything sent before it.
    pub fn packet(&self, packet: Arc<Vec<u8>>) -> Result<(), Broken> {
        self.push(Job::Bytes(Kind::Packet, packet))
    }

    /// Asks the spare to let the guest's packets pass through it; it answers with
    /// [`Reply::PathOpen`].
    pub fn open_path(&self) -> Result<(), Broken> {
        self.push(Job::Small(Kind::Path, Vec::new()))
    }

    /// Lists the spares.
    pub fn members(&self, members: &[MemberEntry]) -> Result<(), Broken> {
        self.small(Kind::Members, &members)
    }

    /// Offers the term.
    pub fn offer_switchover(&self, offer: SwitchoverOffer) -> Result<(), Broken> {
        self.small(Kind::SwitchoverOffer, &offer)
    }

    /// Says that the guest was killed.
    pub fn guest_died(&self) -> Result<(), Broken> {
        self.push(Job::Small(Kind::GuestDied, Vec::new()))
    }

    /// Says goodbye after everything queued; the writer ends then.
    pub fn goodbye(&self, goodbye: &Goodbye) -> Result<(), Broken> {
        let said = self.small(Kind::Goodbye, goodbye);
        let mut queue = self.shared.lock();
        queue.closing = true;
        queue.jobs.push_back(Job::Close);
        drop(queue);
        self.shared.changed.notify_all();
        said
    }

    /// The last acknowledgement.
    #[must_use]
    pub fn acknowledged(&self) -> Option<Committed> {
        self.shared.lock().acknowledged
    }

    /// The last checkpoint (event) handed over for sending.
    #[must_use]
    pub fn sent(&self) -> Position {
        self.shared.lock().sent
    }

    /// How many checkpoints have been handed over for sending and not been acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.shared.lock().unanswered.len()
    }

    /// How many bytes can be queued without blocking: a primary takes its next checkpoint when this
    /// is large and the one before is acknowledged, so that a slow spare makes epochs longer.
    #[must_use]
    pub fn room_bytes(&self) -> usize {
        self.shared.limit_bytes.saturating_sub(self.shared.lock().bytes)
    }

    /// Why nothing can be sent any more, if so.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.shared.lock().broken.clone()
    }

    /// What was sent so far.
    #[must_use]
    pub fn stats(&self) -> SendStats {
        let queue = self.shared.lock();
        SendStats { queued_bytes: queue.bytes, ..queue.stats }
    }

    /// Waits until `position` is acknowledged, the stream breaks, or time is up (`None`).
    pub fn wait_committed(
        &self,
        position: Position,
        patience: Duration,
    ) -> Result<Option<Committed>, Broken> {
        let deadline = Instant::now() + patience;
        let mut queue = self.shared.lock();
        loop {
            if let Some(committed) = queue.acknowledged.filter(|c| c.position() >= position) {
                return Ok(Some(committed));
            }
            if let Some(broken) = &queue.broken {
                return Err(broken.clone());
            }
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else {
                return Ok(None);
            };
            let waited = self.shared.changed.wait_timeout(queue, rest);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the spare has told all that it has kept, the stream breaks, or time is up.
    pub fn await_kept(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut queue = self.shared.lock();
        while !queue.kept.whole && queue.broken.is_none() && !queue.closing {
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return };
            let waited = self.shared.changed.wait_timeout(queue, rest);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn small(&self, kind: Kind, message: &impl minicbor::Encode<()>) -> Result<(), Broken> {
        match minicbor::to_vec(message) {
            Ok(bytes) => self.push(Job::Small(kind, bytes)),
            Err(never) => unreachable!("writing to memory cannot fail: {never}"),
        }
    }

    fn push(&self, job: Job) -> Result<(), Broken> {
        self.push_sent(job, None)
    }

    fn push_sent(&self, job: Job, sent: Option<Position>) -> Result<(), Broken> {
        let cost = job.cost();
        let mut queue = self.shared.lock();
        loop {
            if let Some(broken) = &queue.broken {
                return Err(broken.clone());
            }
            if queue.closing {
                return Err(Broken("it was closed".into()));
            }
            // One job larger than the limit goes alone.
            if queue.bytes == 0 || queue.bytes.saturating_add(cost) <= self.shared.limit_bytes {
                break;
            }
            if queue.given_up {
                return Err(Broken("the spare is given up".into()));
            }
            queue = self.shared.wait(queue);
        }
        queue.bytes += cost;
        if let Job::End(position, _) = job {
            queue.unanswered.push_back(position);
        }
        queue.jobs.push_back(job);
        queue.sent = sent.unwrap_or(queue.sent);
        drop(queue);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        if queue.broken.is_none() && !queue.closing {
            queue.closing = true;
            let text = "the primary gave up the stream".to_owned();
            let goodbye = Goodbye { code: GoodbyeCode::Failed, text };
            if let Ok(bytes) = minicbor::to_vec(&goodbye) {
                queue.jobs.push_back(Job::Small(Kind::Goodbye, bytes));
            }
            queue.jobs.push_back(Job::Close);
        }
        drop(queue);
        self.shared.changed.notify_all();
    }
}

/// Encodes and writes what a [`Sender`] queues.
pub struct Writer<W> {
    stream: W,
    shared: Arc<Shared>,
    encoder: PageEncoder,
    /// What is told beside pages in the frame under way.
    beside: Vec<u8>,
    buffer: FrameBuffer,
    /// The checkpoint under way is a full one.
    full: bool,
    frames: u64,
    hash: u64,
    pace: Pace,
    stats: SendStats,
}

impl<W: Write> Writer<W> {
    /// Runs until goodbye (`Ok`) or until the stream breaks.
    pub fn run(mut self) -> io::Result<()> {
        loop {
            let job = self.next_job();
            let cost = job.cost();
            let closes = matches!(job, Job::Close);
            if let Err(error) = self.carry_out(job) {
                self.shared.fail(error.to_string());
                return Err(error);
            }
            if closes {
                self.shared.fail("it was closed".into());
                return Ok(());
            }
            let mut queue = self.shared.lock();
            queue.bytes = queue.bytes.saturating_sub(cost);
            queue.stats = self.stats;
            drop(queue);
            self.shared.changed.notify_all();
        }
    }

    fn next_job(&self) -> Job {
        let mut queue = self.shared.lock();
        loop {
            if let Some(job) = queue.urgent.pop_front() {
                return job;
            }
            if let Some(job) = queue.jobs.pop_front() {
                return job;
            }
            if queue.broken.is_some() {
                return Job::Close;
            }
            queue = self.shared.wait(queue);
        }
    }

    fn carry_out(&mut self, job: Job) -> io::Result<()> {
        match job {
            Job::Begin(begin) => {
                self.full = begin.full;
                if begin.full {
                    self.encoder.begin_anew();
                }
                let bytes = seal(&mut self.buffer, Kind::CheckpointBegin, &begin);
                (self.frames, self.hash) = (0, chain(0, checksum_of(bytes)));
                self.write()
            }
            Job::Pages(batch) => self.pages(&batch),
            Job::ZeroRuns(owner, runs) => self.whole_runs(owner, &runs, encode_zero_runs),
            Job::DiscardRuns(owner, runs) => self.whole_runs(owner, &runs, encode_discard_runs),
            Job::Bytes(kind @ (Kind::State | Kind::FileChanges), bytes) => {
                for piece in bytes.chunks(PAYLOAD_BYTES_MAX) {
                    self.buffer.clear();
                    self.buffer.extend(piece);
                    self.send_part(kind, 0)?;
                }
                Ok(())
            }
            Job::Bytes(kind, bytes) => self.send_small(kind, &bytes),
            Job::End(position, inputs) => {
                let (frames, hash) = (self.frames, self.hash);
                let end = CheckpointEnd { position, frames, hash, inputs };
                seal(&mut self.buffer, Kind::CheckpointEnd, &end);
                if self.full {
                    // The ghost before makes room for the one of this checkpoint.
                    self.encoder.kept.end();
                }
                self.write()
            }
            Job::Kept(key, digests) => {
                self.encoder.kept.learn(key, &digests);
                Ok(())
            }
            Job::Output(epoch, packet) => {
                seal_packet(&mut self.buffer, Kind::Output, epoch.0, &packet);
                self.write()
            }
            Job::Small(kind, bytes) => {
                if kind == Kind::Abort {
                    self.encoder.begin_anew();
                }
                self.send_small(kind, &bytes)
            }
            Job::Close => self.stream.flush(),
        }
    }

    fn whole_runs(
        &mut self,
        owner: PageOwner,
        runs: &[PageRun],
        encode: fn(PageOwner, &[PageRun], &mut Vec<u8>),
    ) -> io::Result<()> {
        self.encoder.discarded(owner, runs);
        for runs in runs.chunks(RUNS_PER_FRAME_MAX) {
            self.buffer.clear();
            encode(owner, runs, self.buffer.payload());
            self.send_part(Kind::Pages, 0)?;
        }
        Ok(())
    }

    fn send_small(&mut self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > PAYLOAD_BYTES_MAX {
            return Err(io::Error::other(format!("a {kind:?} of {} bytes", bytes.len())));
        }
        self.buffer.clear();
        self.buffer.extend(bytes);
        self.buffer.seal(kind, 0);
        self.write()
    }

    fn pages(&mut self, batch: &PageBatch) -> io::Result<()> {
        let (mut bodies, mut runs) = (batch.pages(), Vec::new());
        let mut pages = 0;
        for run in &batch.runs {
            let mut rest = *run;
            while rest.pages > 0 {
                let taken = rest.pages.min((PAGES_PER_FRAME_MAX - pages) as u32);
                runs.push(PageRun { first: rest.first, pages: taken });
                pages += taken as usize;
                rest.first += u64::from(taken) * PAGE as u64;
                rest.pages -= taken;
                if pages == PAGES_PER_FRAME_MAX {
                    let bodies = bodies.by_ref().take(pages).collect();
                    self.page_frame(batch.owner, &runs, bodies)?;
                    runs.clear();
                    pages = 0;
                }
            }
        }
        if pages > 0 {
            self.page_frame(batch.owner, &runs, bodies.collect())?;
        }
        Ok(())
    }

    fn page_frame(
        &mut self,
        owner: PageOwner,
        runs: &[PageRun],
        pages: Vec<&[u8]>,
    ) -> io::Result<()> {
        let bytes = pages.len() * PAGE;
        let effort = self.pace.effort();
        self.buffer.clear();
        let mut beside = std::mem::take(&mut self.beside);
        beside.clear();
        let start = Instant::now();
        let payload = self.buffer.payload();
        let (counts, bodies) = match effort {
            Effort::Squeeze => (self.encoder.squeeze(owner, runs, &pages, payload), Vec::new()),
            Effort::Plain => self.encoder.plain(owner, runs, &pages, payload, &mut beside),
        };
        let spent = start.elapsed();
        let body = |body: &Body| match body {
            Body::Page(number) => pages[*number],
            Body::Beside(range) => &beside[range.clone()],
        };
        let tail: Vec<&[u8]> = bodies.iter().map(body).collect();
        let after = self.buffer.payload().len() + tail.iter().map(|body| body.len()).sum::<usize>();
        self.pace.encoded(effort, bytes, after, spent);
        self.stats.encode_time += spent;
        self.stats.page_bytes += bytes as u64;
        self.stats.pages.add_all(counts);
        let flags = if effort == Effort::Squeeze { FLAG_REMEMBER } else { 0 };
        let sent = self.send_part_with(Kind::Pages, flags, &tail);
        self.beside = beside;
        sent
    }

    /// Sends the buffer as a frame that counts towards the checkpoint's hash.
    fn send_part(&mut self, kind: Kind, flags: u16) -> io::Result<()> {
        self.send_part_with(kind, flags, &[])
    }

    /// The same of the buffer and what follows it.
    fn send_part_with(&mut self, kind: Kind, flags: u16, tail: &[&[u8]]) -> io::Result<()> {
        let checksum = self.buffer.seal_with(kind, flags, tail);
        self.frames += 1;
        self.hash = chain(self.hash, checksum);
        self.write_with(tail)
    }

    fn write(&mut self) -> io::Result<()> {
        self.write_with(&[])
    }

    fn write_with(&mut self, tail: &[&[u8]]) -> io::Result<()> {
        let start = Instant::now();
        let all = std::iter::once(self.buffer.sealed()).chain(tail.iter().copied());
        let bytes: usize = all.clone().map(<[u8]>::len).sum();
        write_pieces(&mut self.stream, all)?;
        let spent = start.elapsed();
        self.pace.wrote(bytes, spent);
        self.stats.wire_bytes += bytes as u64;
        self.stats.write_time += spent;
        Ok(())
    }
}

fn write_pieces<'a>(
    stream: &mut impl Write,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = pieces.map(IoSlice::new).collect();
    let mut rest = slices.as_mut_slice();
    while !rest.is_empty() {
        match stream.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut rest, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn checksum_of(frame: &[u8]) -> u64 {
    frame.get(16..24).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Decides whether compressing pays: encoding and writing share a thread, so a byte costs
/// `plain/link` as it is and `1/squeeze + ratio/link` squeezed. A link that swallows everything
/// into its socket buffer looks fast, and is: nobody waits for it.
struct Pace {
    compression: Compression,
    link: Rate,
    squeeze: Rate,
    /// Bytes after over bytes before squeezing.
    ratio: f64,
    /// The same without: zero pages and lines that have not changed are left out anyway.
    plain: f64,
    frames: u64,
}

/// Even where squeezing did not pay it is tried once in so many frames.
const PROBE_EVERY: u64 = 128;

impl Pace {
    fn new(compression: Compression) -> Pace {
        let squeeze = Rate { bytes_per_s: 600e6 };
        Pace {
            compression,
            link: Rate { bytes_per_s: 2e9 },
            squeeze,
            ratio: 0.5,
            plain: 1.0,
            frames: 0,
        }
    }

    fn effort(&mut self) -> Effort {
        self.frames += 1;
        let pays = self.link.bytes_per_s < self.squeeze.bytes_per_s * (self.plain - self.ratio);
        // On a link faster than squeezing anything to nothing there is no point in asking.
        let asks = self.link.bytes_per_s < self.squeeze.bytes_per_s
            && self.frames.is_multiple_of(PROBE_EVERY);
        match self.compression {
            Compression::Off => Effort::Plain,
            Compression::Always => Effort::Squeeze,
            Compression::Adaptive if pays || asks => Effort::Squeeze,
            Compression::Adaptive => Effort::Plain,
        }
    }

    fn wrote(&mut self, bytes: usize, spent: Duration) {
        self.link.learn(bytes, spent);
    }

    fn encoded(&mut self, effort: Effort, before: usize, after: usize, spent: Duration) {
        let ratio = after as f64 / before.max(1) as f64;
        match effort {
            Effort::Plain => self.plain += (ratio - self.plain) * 0.1,
            Effort::Squeeze => {
                self.squeeze.learn(before, spent);
                self.ratio += (ratio - self.ratio) * 0.1;
            }
        }
    }
}

struct Rate {
    bytes_per_s: f64,
}

impl Rate {
    /// Moves towards the new measurement, the more the more bytes it is about: the last 8 MiB or
    /// so count. Small frames say nothing of a link.
    fn learn(&mut self, bytes: usize, spent: Duration) {
        if bytes < 16 << 10 {
            return;
        }
        let weight = (bytes as f64 / (8u64 << 20) as f64).min(1.0);
        let seconds = spent.as_secs_f64().max(1e-9);
        // Averaged as time per byte: the slow pieces are where the time goes.
        let before = 1.0 / self.bytes_per_s;
        self.bytes_per_s = 1.0 / (before + (seconds / bytes as f64 - before) * weight);
    }
}

/// What the spare answers.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// It has everything up to here.
    Committed(Committed),
    /// It declines the switchover.
    SwitchoverRefused(String),
    /// It closes the stream on purpose.
    Goodbye(Goodbye),
    /// Clients reach it now, and it passes on what they say.
    PathOpen,
    /// A packet for the guest, and its number.
    Input(u64, Vec<u8>),
}

/// Reads the spare's answers, on a thread of its own.
pub struct ReplyReader<R> {
    stream: R,
    frames: FrameReader,
    shared: Arc<Shared>,
}

impl<R: Read> ReplyReader<R> {
    /// Waits for the next answer. After an error nothing can be sent either.
    #[expect(clippy::should_implement_trait, reason = "an error ends it, not None")]
    pub fn next(&mut self) -> Result<Reply, FrameError> {
        let reply = self.read();
        if let Err(error) = &reply {
            self.shared.fail(error.to_string());
        }
        reply
    }

    fn read(&mut self) -> Result<Reply, FrameError> {
        let mut frame = self.frames.read(&mut self.stream)?;
        while frame.kind == Kind::Kept {
            self.shared.learn(&frame)?;
            frame = self.frames.read(&mut self.stream)?;
        }
        match frame.kind {
            Kind::Ack => {
                let position: Position = open(&frame)?;
                let mut queue = self.shared.lock();
                let before = queue.acknowledged.map(Committed::position);
                if position > queue.sent || before > Some(position) {
                    let why = "it acknowledges what was not sent, or goes back";
                    return Err(FrameError::OutOfPlace { kind: frame.kind, why });
                }
                let committed = Committed(position);
                queue.acknowledged = Some(committed);
                queue.unanswered.retain(|sent| *sent > position);
                drop(queue);
                self.shared.changed.notify_all();
                Ok(Reply::Committed(committed))
            }
            Kind::SwitchoverRefused => Ok(Reply::SwitchoverRefused(open(&frame)?)),
            Kind::Goodbye => Ok(Reply::Goodbye(open(&frame)?)),
            Kind::Path => Ok(Reply::PathOpen),
            Kind::Input => {
                let (number, packet) = open_packet(&frame)?;
                Ok(Reply::Input(number, packet.to_vec()))
            }
            Kind::Hello
            | Kind::Welcome
            | Kind::Refuse
            | Kind::CheckpointBegin
            | Kind::Pages
            | Kind::State
            | Kind::FileChanges
            | Kind::CheckpointEnd
            | Kind::Abort
            | Kind::Files
            | Kind::Event
            | Kind::Packet
            | Kind::Output
            | Kind::Kept
            | Kind::Members
            | Kind::SwitchoverOffer
            | Kind::GuestDied => {
                let why = "a spare does not send it";
                Err(FrameError::OutOfPlace { kind: frame.kind, why })
            }
        }
    }
}
