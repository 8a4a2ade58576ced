//! Brings in what is missing while the guest runs.
//!
//! One thread owns the books: it reads what happens to the guest's memory and puts pages in. So a
//! page never goes where it belongs no more: whoever unmaps, moves, discards or forks waits until
//! that thread has read of it. Helpers only fetch; those for pages that somebody waits for do
//! nothing else.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::memory::{MmId, PAGE_BYTES, PageOwner};
use hotspare_image::source::{Block, BlockContent, PageSource, SourceError, Span};
use hotspare_kernel::{HostPid, KernelError, pidfd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::space::{Asked, LazySpace};
use crate::capture::ranges::{Ranges, merge_sorted};

/// Asked for at once behind the guest.
const REQUEST_BYTES: u64 = 512 << 10;
/// Such requests under way at most.
const REQUESTS_MAX: usize = 8;
/// Helpers for what somebody waits for.
const URGENT_HELPERS: usize = 4;
/// Fetched with a page that somebody waits for, first; more of it if that goes on in a row.
const AROUND_BYTES: u64 = 128 << 10;

/// Why a guest whose memory was not all there could not go on. It has been killed; until its last
/// process has ended this must be kept, for whoever waits for a page would run on without it.
#[derive(Debug, thiserror::Error)]
#[error("the guest was stopped, because the rest of its memory cannot be had: {why}")]
pub struct LoadFailure {
    /// What happened.
    pub why: String,
    _unserved: Vec<LazySpace>,
}

/// How a load went.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Bytes that were brought in while the guest ran.
    pub bytes: u64,
    /// How long that took.
    pub took: Duration,
    /// Pages that somebody waited for before they had been asked for, in that order. Whoever
    /// predicts what a program touches learns from it.
    pub missed: Vec<Span>,
    /// How often somebody waited for a page that was under way.
    pub late: u64,
    /// Pages of which the checkpoint has nothing.
    pub empty: u64,
    /// How long threads waited, in all.
    pub waited: Duration,
}

/// What others may know of a load.
#[derive(Debug, Default)]
pub struct LoaderProgress {
    bytes_left: AtomicU64,
    done: AtomicBool,
}

impl LoaderProgress {
    /// Bytes still to come.
    pub fn bytes_left(&self) -> u64 {
        self.bytes_left.load(Ordering::Relaxed)
    }

    /// Whether the guest has all its memory. Only then writes to it can be tracked.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

/// Has everything that a guest still misses.
#[derive(Debug)]
pub struct Loader {
    spaces: Vec<LazySpace>,
    order: VecDeque<Span>,
    init: OwnedFd,
    progress: Arc<LoaderProgress>,
}

struct Request {
    spans: Vec<Span>,
    urgent: bool,
    sent: Instant,
}

struct Reply {
    request: Request,
    blocks: Result<Vec<Block>, SourceError>,
}

/// The thread that owns the books, at work.
struct Work<'a> {
    spaces: Vec<LazySpace>,
    order: VecDeque<Span>,
    /// What has been asked for, by where it is in the checkpoint.
    flying: BTreeMap<MmId, Ranges>,
    urgent: Sender<Request>,
    behind: Sender<Request>,
    under_way: usize,
    pace: Pace,
    around: Around,
    loaded: Loaded,
    progress: &'a LoaderProgress,
}

/// How many requests are under way at once: as many as do not slow each other down.
struct Pace {
    limit: usize,
    fastest: Duration,
}

impl Pace {
    fn took(&mut self, time: Duration) {
        self.fastest = self.fastest.min(time);
        self.limit = if time > self.fastest * 2 { self.limit - 1 } else { self.limit + 1 };
        self.limit = self.limit.clamp(2, REQUESTS_MAX);
    }
}

/// How much is fetched with a page: twice as much each time the guest waits right behind it.
#[derive(Default)]
struct Around {
    end: u64,
    bytes: u64,
}

impl Around {
    fn next(&mut self, source: u64) -> u64 {
        let in_a_row = self.end != 0 && source.abs_diff(self.end) <= self.bytes;
        let more = if in_a_row { self.bytes * 2 } else { AROUND_BYTES };
        self.bytes = more.clamp(AROUND_BYTES, REQUEST_BYTES);
        self.end = source + self.bytes;
        self.bytes
    }
}

impl Loader {
    pub(crate) fn new(
        spaces: Vec<LazySpace>,
        order: Vec<Span>,
        init: HostPid,
    ) -> hotspare_kernel::Result<Self> {
        let progress = LoaderProgress::default();
        let left: u64 = spaces.iter().map(|space| space.pending.bytes()).sum();
        progress.bytes_left.store(left, Ordering::Relaxed);
        let (order, progress) = (order.into(), Arc::new(progress));
        Ok(Self { spaces, order, init: pidfd::open(init)?, progress })
    }

    /// Whether all memory is there already, and it need not [run](Loader::run).
    pub fn is_done(&self) -> bool {
        self.spaces.is_empty()
    }

    /// For others to look at.
    pub fn progress(&self) -> Arc<LoaderProgress> {
        self.progress.clone()
    }

    /// Serves the guest until all its memory is there, with helpers of its own. To be called on a
    /// thread that nobody who is traced or traces waits for, before the ghost is finalised: from
    /// then on its memory is touched.
    ///
    /// On failure the guest has been told to die; see [`LoadFailure`].
    pub fn run(self, source: &dyn PageSource) -> Result<Loaded, LoadFailure> {
        let Self { spaces, order, init, progress } = self;
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let bell = match bell {
            Ok(bell) => bell,
            Err(errno) => return Err(fail(&init, spaces, errno.to_string())),
        };
        let (replies, answered) = mpsc::channel();
        let (urgent, urgent_requests) = mpsc::channel();
        let (behind, behind_requests) = mpsc::channel();
        let (urgent_requests, behind_requests) =
            (Mutex::new(urgent_requests), Mutex::new(behind_requests));
        std::thread::scope(|scope| {
            let bell = &bell;
            for (requests, helpers) in
                [(&urgent_requests, URGENT_HELPERS), (&behind_requests, REQUESTS_MAX)]
            {
                for _ in 0..helpers {
                    let replies = replies.clone();
                    scope.spawn(move || fetch(source, requests, &replies, bell));
                }
            }
            let mut work = Work {
                spaces,
                order,
                flying: BTreeMap::new(),
                urgent,
                behind,
                under_way: 0,
                pace: Pace { limit: 2, fastest: Duration::MAX },
                around: Around::default(),
                loaded: Loaded::default(),
                progress: &progress,
            };
            let began = Instant::now();
            match work.serve(&answered, bell) {
                Ok(()) => {
                    let waited = work.spaces.iter().map(|space| space.waited).sum();
                    let loaded = Loaded { took: began.elapsed(), waited, ..work.loaded };
                    // Whoever sees that it is done may register the memory anew.
                    drop(work.spaces);
                    progress.bytes_left.store(0, Ordering::Relaxed);
                    progress.done.store(true, Ordering::Release);
                    Ok(loaded)
                }
                Err(why) => Err(fail(&init, work.spaces, why)),
            }
        })
    }
}

fn fail(init: &OwnedFd, unserved: Vec<LazySpace>, why: String) -> LoadFailure {
    let killed = pidfd::send_signal(init.as_fd(), libc::SIGKILL);
    if let Err(error) = killed.as_ref()
        && !error.is_died()
    {
        tracing::error!(%error, "the guest waits for memory that cannot be had, and lives on");
    }
    LoadFailure { why, _unserved: unserved }
}

/// Fetches until nobody asks any more.
fn fetch(
    source: &dyn PageSource,
    requests: &Mutex<Receiver<Request>>,
    replies: &Sender<Reply>,
    bell: &EventFd,
) {
    loop {
        let next = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(request) = next else { return };
        let blocks = source.read(&request.spans).and_then(|blocks| {
            let given = covers(&request.spans, &blocks);
            given
                .then_some(blocks)
                .ok_or_else(|| SourceError::Damaged("others were given than were asked for".into()))
        });
        if replies.send(Reply { request, blocks }).is_err() {
            return;
        }
        let _ = bell.write(1);
    }
}

/// Whether a source gave what it was asked for, all of it.
fn covers(wanted: &[Span], blocks: &[Block]) -> bool {
    let mut given = blocks.iter();
    wanted.iter().all(|span| {
        let mut at = span.start;
        while at < span.end() {
            let Some(block) = given.next() else { return false };
            let fits = match &block.content {
                BlockContent::Bytes(bytes) => bytes.len() as u64 == block.span.pages * PAGE_BYTES,
                BlockContent::Zero | BlockContent::Absent => true,
            };
            let part = block.span.owner == span.owner && block.span.start == at;
            if !fits || !part || block.span.pages == 0 || block.span.end() > span.end() {
                return false;
            }
            at = block.span.end();
        }
        true
    }) && given.next().is_none()
}

impl Work<'_> {
    fn serve(&mut self, answered: &Receiver<Reply>, bell: &EventFd) -> Result<(), String> {
        loop {
            self.ask_for_more();
            if self.spaces.iter().all(|space| space.ended || space.pending.is_empty()) {
                return Ok(());
            }
            let ready = self.wait(bell).map_err(|errno| errno.to_string())?;
            for index in ready {
                self.attend(index).map_err(|error| error.to_string())?;
            }
            while let Ok(reply) = answered.try_recv() {
                self.take(reply)?;
            }
            let left = self.spaces.iter().map(|space| space.pending.bytes()).sum();
            self.progress.bytes_left.store(left, Ordering::Relaxed);
        }
    }

    /// Waits for something to do. Spaces of which there is something to read.
    fn wait(&self, bell: &EventFd) -> Result<Vec<usize>, nix::errno::Errno> {
        let watched = self.spaces.iter().map(|space| space.missing.as_fd());
        let mut polled: Vec<PollFd<'_>> =
            watched.chain([bell.as_fd()]).map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut polled, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        let _ = bell.read();
        let readable = |(index, fd): (usize, &PollFd<'_>)| fd.any()?.then_some(index);
        let count = self.spaces.len();
        Ok(polled.iter().take(count).enumerate().filter_map(readable).collect())
    }

    /// Reads what happened in a space and does what it asks for.
    fn attend(&mut self, index: usize) -> Result<(), KernelError> {
        let mut asked = Asked::default();
        self.spaces[index].read(&mut asked)?;
        self.spaces.append(&mut asked.born);
        let mut faults = VecDeque::from(asked.faults);
        while let Some(at) = faults.pop_front() {
            let space = &mut self.spaces[index];
            if space.ended {
                return Ok(());
            }
            let Some(piece) = space.pending.within(at, at + PAGE_BYTES).first().copied() else {
                if space.put_nothing(at)? {
                    self.loaded.empty += 1;
                } else {
                    faults.push_back(at);
                    self.settle(index, &mut faults)?;
                }
                continue;
            };
            space.waiting.push((at, Instant::now()));
            self.hurry(index, piece.source);
        }
        Ok(())
    }

    /// Lets a change of a space's mappings go on that keeps pages from being put in.
    fn settle(&mut self, index: usize, faults: &mut VecDeque<u64>) -> Result<(), KernelError> {
        let mut asked = Asked::default();
        let mut watched = [PollFd::new(self.spaces[index].missing.as_fd(), PollFlags::POLLIN)];
        // It may not have come to telling us yet.
        let _ = poll(&mut watched, 1u8);
        self.spaces[index].read(&mut asked)?;
        self.spaces.append(&mut asked.born);
        faults.extend(asked.faults);
        Ok(())
    }

    /// Somebody waits for the page that was at `source` in the checkpoint.
    fn hurry(&mut self, index: usize, source: u64) {
        let space = &self.spaces[index];
        let owner = PageOwner::Mm(space.id);
        let flying = self.flying.entry(space.id).or_default();
        if !flying.within(source, source + PAGE_BYTES).is_empty() {
            self.loaded.late += 1;
            return;
        }
        self.loaded.missed.push(Span { owner, start: source, pages: 1 });
        let bytes = self.around.next(source);
        let pieces = space.pending.of_source(source, source + bytes);
        let pieces = pieces.iter().map(|piece| (piece.source, piece.source + piece.bytes));
        let wanted = merge_sorted(pieces.collect()).without(flying);
        *flying = flying.with(&wanted);
        let span =
            |(start, end): (u64, u64)| Span { owner, start, pages: (end - start) / PAGE_BYTES };
        let spans: Vec<Span> = wanted.iter().map(span).collect();
        let _ = self.urgent.send(Request { spans, urgent: true, sent: Instant::now() });
        // It will probably go on from there.
        let next = Span { owner, start: source + bytes, pages: REQUEST_BYTES / PAGE_BYTES };
        self.order.push_front(next);
    }

    /// Keeps the helpers busy with what nobody waits for yet.
    fn ask_for_more(&mut self) {
        while self.under_way < self.pace.limit {
            let mut spans = self.next_spans();
            if spans.is_empty() && self.flying.values().all(Ranges::is_empty) {
                // What was passed over, for whatever reason.
                self.order.extend(self.spaces.iter().flat_map(LazySpace::left));
                spans = self.next_spans();
            }
            if spans.is_empty() {
                return;
            }
            let _ = self.behind.send(Request { spans, urgent: false, sent: Instant::now() });
            self.under_way += 1;
        }
    }

    /// What comes next in the order, as far as it is still to come.
    fn next_spans(&mut self) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut room = REQUEST_BYTES;
        while room > 0 {
            let Some(next) = self.order.pop_front() else { break };
            let PageOwner::Mm(id) = next.owner else { continue };
            let mut wanted = Ranges::default();
            for space in self.spaces.iter().filter(|space| space.id == id && !space.ended) {
                let pieces = space.pending.of_source(next.start, next.end());
                let pieces = pieces.iter().map(|piece| (piece.source, piece.source + piece.bytes));
                wanted = wanted.with(&merge_sorted(pieces.collect()));
            }
            let flying = self.flying.entry(id).or_default();
            let mut wanted = wanted.without(flying);
            for (start, bytes) in wanted.take(room) {
                room -= bytes as u64;
                *flying = flying.with(&merge_sorted(vec![(start, start + bytes as u64)]));
                spans.push(Span { owner: next.owner, start, pages: bytes as u64 / PAGE_BYTES });
            }
            if let Some((start, _)) = wanted.iter().next() {
                let pages = (next.end() - start) / PAGE_BYTES;
                self.order.push_front(Span { start, pages, ..next });
            }
        }
        spans
    }

    fn take(&mut self, reply: Reply) -> Result<(), String> {
        let Reply { request, blocks } = reply;
        if !request.urgent {
            self.under_way -= 1;
            let bytes: u64 = request.spans.iter().map(|span| span.pages * PAGE_BYTES).sum();
            if bytes == REQUEST_BYTES {
                self.pace.took(request.sent.elapsed());
            }
        }
        for block in blocks.map_err(|error| error.to_string())? {
            self.deliver(&block).map_err(|error| error.to_string())?;
        }
        for span in &request.spans {
            let PageOwner::Mm(id) = span.owner else { continue };
            let flying = self.flying.entry(id).or_default();
            *flying = flying.without(&merge_sorted(vec![(span.start, span.end())]));
        }
        Ok(())
    }

    /// Puts a block in wherever its pages are now: also in children that were forked meanwhile.
    fn deliver(&mut self, block: &Block) -> Result<(), KernelError> {
        let PageOwner::Mm(id) = block.span.owner else { return Ok(()) };
        let mut index = 0;
        // Children come to the end.
        while index < self.spaces.len() {
            if self.spaces[index].id == id {
                self.deliver_to(index, block)?;
            }
            index += 1;
        }
        Ok(())
    }

    fn deliver_to(&mut self, index: usize, block: &Block) -> Result<(), KernelError> {
        let mut faults = VecDeque::new();
        loop {
            let space = &mut self.spaces[index];
            let (start, end) = (block.span.start, block.span.end());
            let Some(piece) = space.pending.of_source(start, end).first().copied() else { break };
            if space.ended {
                break;
            }
            let before = space.pending.bytes();
            let is_in = match &block.content {
                BlockContent::Bytes(bytes) => {
                    let from = (piece.source - start) as usize;
                    space.put(piece, &bytes[from..from + piece.bytes as usize])?
                }
                BlockContent::Zero | BlockContent::Absent => {
                    space.put_zeroes(piece)?;
                    true
                }
            };
            self.loaded.bytes += before - space.pending.bytes();
            if !is_in {
                self.settle(index, &mut faults)?;
            }
        }
        // Those who were heard on the way ask again.
        let missing = &self.spaces[index].missing;
        faults.into_iter().try_for_each(|at| missing.wake(at, PAGE_BYTES))
    }
}
