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
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::memory::{MmId, PAGE_BYTES, PageOwner};
use hotspare_image::source::{Block, BlockContent, PageSource, SourceError, Span};
use hotspare_kernel::{HostPid, KernelError, pidfd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::head::Head;
use super::plan::Plan;
use super::space::{Asked, LazySpace, page_of};
use crate::capture::ranges::{Ranges, merge_sorted};

/// Asked for at once.
const REQUEST_BYTES: u64 = 512 << 10;
/// Requests for what comes later that are under way while the guest cannot start yet: so many that
/// the line is not idle when it does.
const AHEAD_MAX: usize = 4;
/// Such requests under way at most.
const REQUESTS_MAX: usize = 12;
/// When the guest has just started.
const LIMIT_FIRST: usize = 6;
/// Helpers for what somebody waits for.
const URGENT_HELPERS: usize = 8;
/// Fetched with a page that somebody waits for, first; more of it if that goes on in a row.
const AROUND_BYTES: u64 = 128 << 10;
/// Around what somebody waited for, so often [`REQUEST_BYTES`] on either side come next.
const NEAR_RINGS: u64 = 2;
/// So long after its start somebody waits for the guest, and little comes behind while it waits.
const YOUNG: Duration = Duration::from_secs(2);
/// Who has waited for a page waits for the next one within this, if at all.
const NEXT_WAIT: Duration = Duration::from_millis(20);
/// That lasts for so small a part of the whole load, all in all. Who goes over all of its memory
/// waits all the time, and has it sooner if the line is full.
const STANDS_BACK: u32 = 48;

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
    /// Bytes that were there before the guest could start.
    pub before: u64,
    /// How long that took, of all the time.
    pub until_start: Duration,
    /// How often somebody waited for a page that was under way.
    pub late: u64,
    /// Pages that were asked for because one that was waited for points to them.
    pub pointed: u64,
    /// Pages of which the checkpoint has nothing.
    pub empty: u64,
    /// How long pages were waited for, each counted once however many waited for it.
    pub waited: Duration,
}

/// What others may know of a load.
#[derive(Debug, Default)]
pub struct LoaderProgress {
    bytes_left: AtomicU64,
    done: AtomicBool,
    start: Mutex<Option<Result<(), String>>>,
    decided: Condvar,
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

    /// Whether it was said that the guest may start.
    pub fn has_started(&self) -> bool {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(*start, Some(Ok(())))
    }

    /// Why the guest cannot start, if that is known.
    pub(crate) fn failure(&self) -> Option<String> {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        start.as_ref().and_then(|start| start.clone().err())
    }

    /// Waits until the guest may start, or cannot, and why.
    pub(crate) fn wait_for_start(&self) -> Result<(), String> {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = self.decided.wait_while(start, |start| start.is_none());
        let decided = decided.unwrap_or_else(PoisonError::into_inner);
        decided.clone().unwrap_or(Ok(()))
    }

    /// Only the first answer counts.
    fn decide(&self, start: Result<(), String>) {
        let mut decided = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        decided.get_or_insert(start);
        self.decided.notify_all();
    }
}

/// Has everything that a guest still misses.
#[derive(Debug)]
pub struct Loader {
    spaces: Vec<LazySpace>,
    first: VecDeque<Span>,
    order: VecDeque<Span>,
    head: Head,
    init: OwnedFd,
    progress: Arc<LoaderProgress>,
}

struct Request {
    spans: Vec<Span>,
    kind: Kind,
    sent: Instant,
}

/// What for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Somebody waits for it.
    Urgent,
    /// The guest cannot start without it.
    First,
    /// It comes behind.
    Behind,
}

struct Reply {
    request: Request,
    blocks: Result<Vec<Block>, SourceError>,
}

/// The thread that owns the books, at work.
struct Work<'a> {
    began: Instant,
    source: &'a dyn PageSource,
    spaces: Vec<LazySpace>,
    /// Before anything else, of `order`.
    first: VecDeque<Span>,
    order: VecDeque<Span>,
    /// Until the guest may start.
    head: Option<Head>,
    /// What has been asked for, by where it is in the checkpoint.
    flying: BTreeMap<MmId, Ranges>,
    urgent: Sender<Request>,
    behind: Sender<Request>,
    under_way: usize,
    /// Of these, such for what comes behind.
    ahead: usize,
    pace: Pace,
    around: Around,
    /// Requests for what somebody waits for, or will.
    hurried: usize,
    /// When one was answered last.
    answered: Option<Instant>,
    courtesy: Courtesy,
    loaded: Loaded,
    progress: &'a LoaderProgress,
}

/// How many requests are under way at once: as many as do not slow each other down.
struct Pace {
    limit: usize,
    fastest: Duration,
}

/// Whoever waits for a page may wait so much longer because of what comes behind; less cannot be
/// told from a busy processor.
const QUEUE_MAX: Duration = Duration::from_millis(10);

impl Pace {
    fn took(&mut self, time: Duration) {
        // One answer that came by a happy chance is not what others are measured by for ever.
        self.fastest = self.fastest.saturating_add(self.fastest / 32).min(time);
        let is_slow = time > self.fastest + self.fastest.max(QUEUE_MAX);
        self.limit = if is_slow { self.limit - 1 } else { self.limit + 1 };
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

/// How long the line has been left to those who wait.
#[derive(Debug, Default)]
struct Courtesy {
    spent: Duration,
    since: Option<Instant>,
}

/// How far a load has come.
#[derive(Clone, Copy, Debug)]
struct Come {
    bytes: u64,
    left: u64,
    took: Duration,
}

impl Courtesy {
    /// Whether the line is to be left to who waits, if somebody does, from now on until this is
    /// asked again.
    fn stands_back(&mut self, is_waited: bool, come: Come, now: Instant) -> bool {
        if let Some(since) = self.since.take() {
            self.spent += now.saturating_duration_since(since);
        }
        let stands_back = is_waited && self.spent < Self::allowed(come);
        self.since = stands_back.then_some(now);
        stands_back
    }

    /// A part of the time that the whole load takes at the rate of what has come.
    fn allowed(come: Come) -> Duration {
        let whole = (come.bytes + come.left) as f64 / come.bytes.max(1) as f64;
        come.took.mul_f64(whole) / STANDS_BACK
    }
}

impl Loader {
    /// What the plan has is part of what the spaces miss; `all` follows it.
    pub(crate) fn new(
        spaces: Vec<LazySpace>,
        plan: Plan,
        all: Vec<Span>,
        init: HostPid,
    ) -> hotspare_kernel::Result<Self> {
        let progress = LoaderProgress::default();
        let left: u64 = spaces.iter().map(|space| space.pending.bytes()).sum();
        progress.bytes_left.store(left, Ordering::Relaxed);
        let head = Head::new(&plan.first, &plan.then);
        let then = plan.then.into_iter().flat_map(|due| due.spans);
        let (order, progress) = (then.chain(all).collect(), Arc::new(progress));
        let first = plan.first.into();
        Ok(Self { spaces, first, order, head, init: pidfd::open(init)?, progress })
    }

    /// For others to look at.
    pub fn progress(&self) -> Arc<LoaderProgress> {
        self.progress.clone()
    }

    /// Serves the guest until all its memory is there, with helpers of its own. To be called on a
    /// thread that nobody who is traced or traces waits for, before the ghost's memory is touched.
    ///
    /// On failure the guest has been told to die; see [`LoadFailure`]. Before that `lost` hears
    /// why: whoever waits for the guest's end may be gone with it.
    pub fn run(self, source: &dyn PageSource, lost: &dyn Fn(&str)) -> Result<Loaded, LoadFailure> {
        let Self { spaces, first, order, head, init, progress } = self;
        let fail = |spaces, why: String| {
            lost(&why);
            fail(&init, spaces, &progress, why)
        };
        let _told = Told(&progress);
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let bell = match bell {
            Ok(bell) => bell,
            Err(errno) => return Err(fail(spaces, errno.to_string())),
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
                    let helper = move || fetch(source, requests, &replies, bell);
                    let helper = std::thread::Builder::new().spawn_scoped(scope, helper);
                    if let Err(error) = helper {
                        let why = format!("start a thread: {error}");
                        return Err(fail(spaces, why));
                    }
                }
            }
            let began = Instant::now();
            let mut work = Work {
                began,
                source,
                spaces,
                first,
                order,
                head: Some(head),
                flying: BTreeMap::new(),
                urgent,
                behind,
                under_way: 0,
                ahead: 0,
                pace: Pace { limit: LIMIT_FIRST, fastest: Duration::MAX },
                around: Around::default(),
                hurried: 0,
                answered: None,
                courtesy: Courtesy::default(),
                loaded: Loaded::default(),
                progress: &progress,
            };
            match work.serve(&answered, bell) {
                Ok(()) => {
                    work.judge();
                    let waited = work.spaces.iter().map(|space| space.waited).sum();
                    let loaded = Loaded { took: began.elapsed(), waited, ..work.loaded };
                    // Whoever sees that it is done may register the memory anew.
                    drop(work.spaces);
                    progress.bytes_left.store(0, Ordering::Relaxed);
                    progress.done.store(true, Ordering::Release);
                    progress.decide(Ok(()));
                    Ok(loaded)
                }
                Err(why) => Err(fail(work.spaces, why)),
            }
        })
    }
}

fn fail(
    init: &OwnedFd,
    unserved: Vec<LazySpace>,
    progress: &LoaderProgress,
    why: String,
) -> LoadFailure {
    progress.decide(Err(why.clone()));
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

/// Bytes that came over a line, unpacked.
fn with_bytes(blocks: &[Block]) -> u64 {
    let bytes = blocks.iter().map(|block| match &block.content {
        BlockContent::Bytes(bytes) => bytes.len() as u64,
        BlockContent::Zero | BlockContent::Absent => 0,
    });
    bytes.sum()
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

/// Whoever waits for the start hears of the end, even if that is a panic.
struct Told<'a>(&'a LoaderProgress);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.decide(Err("the loader has ended".into()));
    }
}

/// Whether nothing of a span of the checkpoint is still to come.
fn is_there(spaces: &[LazySpace], span: &Span) -> bool {
    let PageOwner::Mm(id) = span.owner else { return true };
    let mut its = spaces.iter().filter(|space| space.id == id && !space.ended);
    its.all(|space| space.pending.of_source(span.start, span.end()).is_empty())
}

impl Work<'_> {
    fn serve(&mut self, answered: &Receiver<Reply>, bell: &EventFd) -> Result<(), String> {
        loop {
            self.judge();
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

    /// Lets the guest start if it may.
    fn judge(&mut self) {
        let Some(head) = &mut self.head else { return };
        let spaces = &self.spaces;
        if head.may_start(|span| is_there(spaces, span)) {
            self.head = None;
            self.loaded.before = self.loaded.bytes;
            self.loaded.until_start = self.began.elapsed();
            self.progress.decide(Ok(()));
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
            let page = page_of(at);
            let Some(piece) = space.pending.within(page, page + PAGE_BYTES).first().copied() else {
                if space.put_nothing(page)? {
                    self.loaded.empty += 1;
                } else {
                    faults.push_back(at);
                    self.settle(index, &mut faults)?;
                }
                continue;
            };
            let is_new = space.awaits(at);
            self.hurry(index, piece.source, is_new);
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
    fn hurry(&mut self, index: usize, source: u64, is_new: bool) {
        let space = &self.spaces[index];
        let owner = PageOwner::Mm(space.id);
        let flying = self.flying.entry(space.id).or_default();
        if !flying.within(source, source + PAGE_BYTES).is_empty() {
            self.loaded.late += u64::from(is_new);
            let after = self.began.elapsed();
            tracing::debug!(at = format_args!("{source:#x}"), ?after, "under way");
            return;
        }
        let after = self.began.elapsed();
        tracing::debug!(at = format_args!("{source:#x}"), ?after, "not foreseen");
        self.loaded.missed.push(Span { owner, start: source, pages: 1 });
        let bytes = self.around.next(source);
        let wanted = Span { owner, start: source, pages: bytes / PAGE_BYTES };
        let spans = self.claim(wanted, bytes).0;
        self.ask_urgently(spans);
        // It will probably go on from there, or near it.
        for ring in (0..NEAR_RINGS).rev() {
            let behind = source + bytes + ring * REQUEST_BYTES;
            let before = source.checked_sub((ring + 1) * REQUEST_BYTES);
            for start in before.into_iter().chain([behind]) {
                self.order.push_front(Span { owner, start, pages: REQUEST_BYTES / PAGE_BYTES });
            }
        }
    }

    fn ask_urgently(&mut self, spans: Vec<Span>) {
        let request = Request { spans, kind: Kind::Urgent, sent: Instant::now() };
        let _ = self.urgent.send(request);
        self.hurried += 1;
    }

    /// Somebody will probably want the page of this address next, and then what is around it.
    fn foresee(&mut self, index: usize, at: u64, bytes: u64) {
        let (space, page) = (&self.spaces[index], page_of(at));
        let Some(end) = page.checked_add(PAGE_BYTES) else { return };
        let Some(piece) = space.pending.within(page, end).first().copied() else { return };
        let (owner, start) = (PageOwner::Mm(space.id), piece.source);
        if self.lacking(Span { owner, start, pages: 1 }).is_empty() {
            return;
        }
        let after = self.began.elapsed();
        tracing::debug!(at = format_args!("{at:#x}"), ?after, "pointed at");
        self.loaded.pointed += 1;
        let spans = self.claim(Span { owner, start, pages: bytes / PAGE_BYTES }, bytes).0;
        self.ask_urgently(spans);
    }

    /// Keeps the helpers busy with what nobody waits for yet.
    fn ask_for_more(&mut self) {
        // As long as nobody runs who could be slowed down, the line is filled.
        let limit = if self.head.is_some() { REQUESTS_MAX } else { self.limit() };
        while self.under_way < limit {
            let mut kind = Kind::First;
            let mut spans = self.next_spans(kind);
            if spans.is_empty() {
                kind = Kind::Behind;
                // What may wait does not take the line from what may not.
                if self.ahead >= AHEAD_MAX && self.lacks_first() {
                    return;
                }
                spans = self.next_spans(kind);
            }
            if spans.is_empty() && self.flying.values().all(Ranges::is_empty) {
                // What was passed over, for whatever reason.
                self.order.extend(self.spaces.iter().flat_map(LazySpace::left));
                spans = self.next_spans(kind);
            }
            if spans.is_empty() {
                return;
            }
            let _ = self.behind.send(Request { spans, kind, sent: Instant::now() });
            self.under_way += 1;
            self.ahead += usize::from(kind == Kind::Behind);
        }
    }

    /// How many requests for what comes behind may be under way.
    fn limit(&mut self) -> usize {
        let is_young = self.began.elapsed() < self.loaded.until_start + YOUNG;
        let is_waited = self.hurried > 0
            || self.answered.is_some_and(|answered| answered.elapsed() < NEXT_WAIT);
        let (bytes, left) = (self.loaded.bytes, self.progress.bytes_left());
        let come = Come { bytes, left, took: self.began.elapsed() };
        let stands_back = self.courtesy.stands_back(is_young && is_waited, come, Instant::now());
        if stands_back { self.pace.limit.min(AHEAD_MAX) } else { self.pace.limit }
    }

    /// Whether the guest could not start with what is there, whatever the line is like.
    fn lacks_first(&mut self) -> bool {
        let spaces = &self.spaces;
        self.head.as_mut().is_some_and(|head| !head.has_first(|span| is_there(spaces, span)))
    }

    /// What comes next in the order, as far as it is still to come.
    fn next_spans(&mut self, kind: Kind) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut room = REQUEST_BYTES;
        while room > 0 {
            let order = if kind == Kind::First { &mut self.first } else { &mut self.order };
            let Some(next) = order.pop_front() else { break };
            let (some, rest) = self.claim(next, room);
            room = room.saturating_sub(some.iter().map(|span| span.pages * PAGE_BYTES).sum());
            spans.extend(some);
            if let Some(rest) = rest {
                let order = if kind == Kind::First { &mut self.first } else { &mut self.order };
                order.push_front(rest);
            }
        }
        spans
    }

    /// What of a span is to be asked for now, with all that comes along with it; about `room`
    /// bytes. And what of the span is left then.
    fn claim(&mut self, span: Span, room: u64) -> (Vec<Span>, Option<Span>) {
        let mut wanted = self.lacking(span);
        let some = wanted.take(room).into_iter();
        let some: Vec<Span> = some
            .map(|(start, bytes)| Span { start, pages: bytes as u64 / PAGE_BYTES, ..span })
            .collect();
        let mut claimed = Vec::new();
        for whole in self.source.whole(&some) {
            let PageOwner::Mm(id) = whole.owner else { continue };
            let lacking = self.lacking(whole);
            let flying = self.flying.entry(id).or_default();
            *flying = flying.with(&lacking);
            let part = |(start, end): (u64, u64)| Span {
                start,
                pages: (end - start) / PAGE_BYTES,
                ..whole
            };
            claimed.extend(lacking.iter().map(part));
        }
        let left = wanted.iter().next();
        let rest =
            left.map(|(start, _)| Span { start, pages: (span.end() - start) / PAGE_BYTES, ..span });
        (claimed, rest)
    }

    /// What of a span of the checkpoint is still to come and has not been asked for.
    fn lacking(&self, span: Span) -> Ranges {
        let PageOwner::Mm(id) = span.owner else { return Ranges::default() };
        let mut wanted = Ranges::default();
        for space in self.spaces.iter().filter(|space| space.id == id && !space.ended) {
            let pieces = space.pending.of_source(span.start, span.end());
            let pieces = pieces.iter().map(|piece| (piece.source, piece.source + piece.bytes));
            wanted = wanted.with(&merge_sorted(pieces.collect()));
        }
        self.flying.get(&id).map_or_else(|| wanted.clone(), |flying| wanted.without(flying))
    }

    fn take(&mut self, reply: Reply) -> Result<(), String> {
        let Reply { request, blocks } = reply;
        let bytes: u64 = request.spans.iter().map(|span| span.pages * PAGE_BYTES).sum();
        if request.kind == Kind::Urgent {
            self.hurried -= 1;
            self.answered = Some(Instant::now());
        } else {
            self.under_way -= 1;
            self.ahead -= usize::from(request.kind == Kind::Behind);
        }
        let blocks = blocks.map_err(|error| error.to_string())?;
        let took = request.sent.elapsed();
        tracing::debug!(kind = ?request.kind, bytes, ?took, under_way = self.under_way, "came");
        // What is small, or zeroes, does not come over the line in the time of a whole request.
        if request.kind == Kind::Behind && with_bytes(&blocks) >= REQUEST_BYTES {
            self.pace.took(took);
        }
        if let Some(head) = &mut self.head {
            head.came(bytes, Instant::now());
        }
        for block in blocks {
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
        let (mut faults, mut pointers) = (VecDeque::new(), Vec::new());
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
                    let bytes = &bytes[from..from + piece.bytes as usize];
                    pointers.extend(space.pointers(piece, bytes));
                    space.put(piece, bytes)?
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
        for (at, is_first) in pointers {
            self.foresee(index, at, if is_first { AROUND_BYTES } else { PAGE_BYTES });
        }
        // Those who were heard on the way ask again.
        let missing = &self.spaces[index].missing;
        faults.into_iter().try_for_each(|at| missing.wake(page_of(at), PAGE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_left_to_who_waits_for_a_part_of_the_load_and_no_longer() {
        let (mut courtesy, began) = (Courtesy::default(), Instant::now());
        let at = |ms: u64| began + Duration::from_millis(ms);
        // A tenth has come in 480 ms: the whole load takes 4.8 s, of which 100 ms may be given.
        let come = |ms| Come { bytes: 10, left: 90, took: Duration::from_millis(ms) };
        assert!(!courtesy.stands_back(false, come(480), at(480)), "nobody waits");
        assert!(courtesy.stands_back(true, come(480), at(480)));
        assert!(courtesy.stands_back(true, come(480), at(579)));
        assert!(!courtesy.stands_back(true, come(480), at(580)), "it is given");
        // Where nobody waits nothing is spent, and a load that takes longer has more to give.
        assert!(!courtesy.stands_back(false, come(960), at(960)));
        assert_eq!(courtesy.spent, Duration::from_millis(100));
        assert!(courtesy.stands_back(true, come(960), at(960)));
        // Of a small guest most is there.
        let small = Come { bytes: 90, left: 10, took: Duration::from_millis(432) };
        let mut courtesy = Courtesy::default();
        assert!(courtesy.stands_back(true, small, at(432)));
        assert!(!courtesy.stands_back(true, small, at(442)));
    }
}
