//! What the pause has produced, on its way to the store.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use hotspare_image::files::FileIdentity;
use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::touch::TouchSet;
use hotspare_image::{Position, Term};
use hotspare_process::lazy::Window;
use hotspare_store::{About, Batch, Gatherer, Host, StoreError, StoreResult};

use super::upload::Upload;
use super::{StoreSettings, stored_settings};
use crate::agent::Agent;
use crate::outgoing::Piece;
use crate::settings::Settings;

/// So much may wait for this host's own disk; then epochs get longer …
const WAITING_BYTES_MAX: usize = 64 << 20;
/// … for so long. Then what waits is dropped: nobody else waits for a disk that hangs.
const PATIENCE: Duration = Duration::from_secs(2);
/// After a failure here, the next full checkpoint is asked for so much later.
const AGAIN: Duration = Duration::from_secs(10);

enum Job {
    Begin(Position, Term, bool),
    Piece(Piece),
    Files(Vec<FileIdentity>),
    End,
    Abort,
    /// What came before is incomplete.
    Lost,
    Close,
}

impl Job {
    fn cost(&self) -> usize {
        64 + match self {
            Job::Piece(Piece::Pages(batch)) => batch.byte_count(),
            Job::Piece(Piece::Files(bytes) | Piece::Copies(bytes) | Piece::State(bytes)) => {
                bytes.len()
            }
            Job::Piece(Piece::Zero(_, runs) | Piece::Discard(_, runs)) => runs.len() * 16,
            Job::Files(files) => files.len() * 128,
            Job::Begin(..) | Job::End | Job::Abort | Job::Lost | Job::Close => 0,
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    bytes: usize,
    /// There has been no room since then.
    full: Option<Instant>,
}

/// What the threads of the store share.
#[derive(Default)]
pub struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The next checkpoint must be a full one; not before then.
    wanted: Mutex<Option<Instant>>,
    /// The writer waits for something to write.
    pub idle: AtomicBool,
    /// What has been gathered has nothing to stand on.
    reset: AtomicBool,
    /// What the guest was last seen to touch, until it is written.
    pub touched: Mutex<Option<TouchSet>>,
    /// Bytes of pages a second that went to the store when much was written last; 0: not yet.
    rate: AtomicU64,
    /// Nothing is stored any more.
    pub over: AtomicBool,
}

/// Fewer bytes of pages say little of the line.
const TELLING_BYTES: u64 = 4 << 20;

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) {
        if self.over.load(Ordering::Relaxed) {
            return;
        }
        let mut queue = self.lock();
        queue.bytes += job.cost();
        queue.jobs.push_back(job);
        drop(queue);
        self.changed.notify_all();
    }

    fn next(&self) -> Job {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                queue.bytes -= job.cost();
                return job;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Unless one is wanted already.
    fn want_full(&self, after: Duration) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.get_or_insert_with(|| Instant::now() + after);
    }

    /// So many bytes of pages were written in this time.
    pub fn wrote(&self, bytes: u64, took: Duration) {
        if bytes >= TELLING_BYTES {
            let rate = bytes as f64 / took.as_secs_f64().max(1e-6);
            self.rate.store((rate as u64).max(1), Ordering::Relaxed);
        }
    }

    /// What was given to the writer is lost: everything anew.
    pub fn begin_anew(&self) {
        self.reset.store(true, Ordering::Relaxed);
    }
}

/// Takes touch sets.
pub struct TouchSink(Arc<Shared>);

impl TouchSink {
    /// For how long touches are worth tracking now: what goes to the store at the bandwidth that
    /// was measured last will come from there at about the same.
    pub fn window(&self) -> Window {
        let usual = Window::default();
        match self.0.rate.load(Ordering::Relaxed) {
            0 => usual,
            bytes_per_second => Window { bytes_per_second, ..usual },
        }
    }

    /// Goes along with the next checkpoint.
    pub fn put(&self, touched: TouchSet) {
        *self.0.touched.lock().unwrap_or_else(PoisonError::into_inner) = Some(touched);
    }
}

/// Takes checkpoints as a spare does, and never makes anybody wait for long.
pub struct Sink {
    shared: Arc<Shared>,
    /// How often a checkpoint is wanted.
    every: Duration,
    ended: Instant,
}

impl Sink {
    /// Whether the next checkpoint must be a full one for it; asked once.
    pub fn takes_full(&self) -> bool {
        let mut wanted = self.shared.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.take_if(|at| *at <= Instant::now()).is_some()
    }

    fn wants_full(&self) -> bool {
        let wanted = self.shared.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.is_some_and(|at| at <= Instant::now())
    }

    /// How long until it wants a checkpoint.
    pub fn wants_in(&self) -> Duration {
        if self.shared.over.load(Ordering::Relaxed) {
            return self.every;
        }
        match self.wants_full() {
            true => Duration::ZERO,
            false => self.every.saturating_sub(self.ended.elapsed()),
        }
    }

    /// Whether there is room for more. Without any for some time what waits is given up.
    pub fn has_room(&self) -> bool {
        let mut queue = self.shared.lock();
        if queue.bytes < WAITING_BYTES_MAX {
            queue.full = None;
            return true;
        }
        if queue.full.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
            return false;
        }
        *queue = Queue::default();
        queue.jobs.push_back(Job::Lost);
        queue.bytes = Job::Lost.cost();
        drop(queue);
        self.shared.changed.notify_all();
        true
    }

    /// For what the guest touches.
    pub fn touches(&self) -> TouchSink {
        TouchSink(Arc::clone(&self.shared))
    }

    /// A checkpoint begins.
    pub fn begin(&self, position: Position, term: Term, full: bool) {
        self.shared.push(Job::Begin(position, term, full));
    }

    /// A piece of it.
    pub fn piece(&self, piece: &Piece) {
        self.shared.push(Job::Piece(piece.clone()));
    }

    /// Files that a host must have alike to go on with it.
    pub fn files(&self, files: &[FileIdentity]) {
        self.shared.push(Job::Files(files.to_vec()));
    }

    /// It is whole.
    pub fn end(&mut self) {
        self.ended = Instant::now();
        self.shared.push(Job::End);
    }

    /// It is void.
    pub fn abort(&self) {
        self.shared.push(Job::Abort);
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.shared.push(Job::Close);
    }
}

/// Starts the threads.
pub fn start(agent: &Agent, settings: &Settings, store: StoreSettings) -> anyhow::Result<Sink> {
    let directory = std::env::temp_dir();
    let gatherer = Gatherer::new(&directory)?;
    let shared = Arc::new(Shared::default());
    shared.want_full(Duration::ZERO);
    let (batches, batch) = sync_channel(0);
    let facts = &agent.facts;
    let about = About {
        settings: stored_settings(settings),
        host: Host {
            kernel: facts.kernel.clone(),
            features: facts.cpu_features.clone(),
            others: facts.others.clone(),
        },
        ..About::default()
    };
    let every = store.every;
    let mut upload = Upload::new(agent, &settings.guest, store, Arc::clone(&shared))?;
    let thread = std::thread::Builder::new().name("store-writer".into());
    thread.spawn(move || upload.run(&batch)).context("start the thread of the store's writer")?;
    let gathering = Gathering {
        gatherer,
        shared: Arc::clone(&shared),
        batches,
        about,
        files: BTreeMap::new(),
        every,
        handed: None,
        agent: agent.clone(),
        told: String::new(),
    };
    let thread = std::thread::Builder::new().name("store".into());
    thread.spawn(move || gathering.run()).context("start the thread of the store")?;
    Ok(Sink { shared, every, ended: Instant::now() })
}

/// The thread `store`.
struct Gathering {
    gatherer: Gatherer,
    shared: Arc<Shared>,
    /// To the writer, which takes one if it has nothing to do.
    batches: SyncSender<(Batch, About)>,
    about: About,
    files: BTreeMap<Vec<u8>, FileIdentity>,
    every: Duration,
    handed: Option<Instant>,
    agent: Agent,
    told: String,
}

impl Gathering {
    fn run(mut self) {
        loop {
            let job = self.shared.next();
            if matches!(job, Job::Close) || self.shared.over.load(Ordering::Relaxed) {
                return;
            }
            if self.shared.reset.swap(false, Ordering::Relaxed) {
                self.begin_anew(Duration::ZERO);
            }
            if let Err(error) = self.take(job) {
                let text = error.to_string();
                if text != self.told {
                    self.agent.reporter.alarm(&format!(
                        "CHECKPOINTS ARE NOT STORED, the guest runs on: {text}; a full one is \
                         tried every {} s",
                        AGAIN.as_secs()
                    ));
                    self.agent.meters.store.failed(&text);
                    self.told = text;
                }
                self.begin_anew(AGAIN);
            }
        }
    }

    /// Forgets everything; a full checkpoint comes.
    fn begin_anew(&mut self, after: Duration) {
        self.gatherer.forget();
        self.shared.want_full(after);
    }

    fn take(&mut self, job: Job) -> StoreResult<()> {
        match job {
            Job::Begin(position, term, full) => {
                if full {
                    self.files.clear();
                }
                self.gatherer.begin(position, term, full);
            }
            Job::Piece(piece) => self.piece(&piece)?,
            Job::Files(files) => {
                self.files.extend(files.into_iter().map(|file| (file.path.clone(), file)));
            }
            Job::End => {
                if !self.gatherer.end()? {
                    self.begin_anew(Duration::ZERO);
                }
                self.hand_over()?;
            }
            Job::Abort => self.gatherer.abort(),
            Job::Lost => {
                return Err(StoreError::Local(
                    "$TMPDIR takes what is to be stored slower than it comes".into(),
                ));
            }
            Job::Close => {}
        }
        Ok(())
    }

    fn piece(&mut self, piece: &Piece) -> StoreResult<()> {
        match piece {
            Piece::Pages(batch) => {
                let mut pages = batch.pages();
                let mut bytes = Vec::new();
                for run in batch.runs() {
                    bytes.clear();
                    pages.by_ref().take(run.pages as usize).for_each(|p| bytes.extend(p));
                    self.gatherer.pages(batch.owner(), run.first, &bytes)?;
                }
            }
            Piece::Zero(owner, runs) => {
                let each = runs.iter();
                each.for_each(|run| self.gatherer.zero(*owner, run.first, run.pages.into()));
            }
            Piece::Discard(owner, runs) => {
                let each = runs.iter();
                each.for_each(|run| self.gatherer.discard(*owner, run.first, run.pages.into()));
            }
            Piece::Files(bytes) => self.gatherer.changes(bytes, false)?,
            Piece::Copies(bytes) => self.gatherer.changes(bytes, true)?,
            Piece::State(bytes) => self.gatherer.state(bytes),
        }
        Ok(())
    }

    /// Gives what has been gathered to the writer, if it is time and the writer is free.
    fn hand_over(&mut self) -> StoreResult<()> {
        self.agent.meters.store.waiting_bytes.set(self.gatherer.waiting_bytes());
        let early = self.handed.is_some_and(|handed| handed.elapsed() < self.every);
        if early || !self.gatherer.is_ready() || !self.shared.idle.load(Ordering::Relaxed) {
            return Ok(());
        }
        let Some(batch) = self.gatherer.take()? else { return Ok(()) };
        let about = About { files: self.files.values().cloned().collect(), ..self.about.clone() };
        self.handed = Some(Instant::now());
        self.told.clear();
        tracing::debug!(
            epoch = batch.position.epoch.0,
            of = batch.epochs,
            mib = (self.agent.meters.store.waiting_bytes.get() / PAGE_BYTES) >> 8,
            "to the store"
        );
        match self.batches.try_send((batch, about)) {
            Ok(()) => Ok(()),
            // It said that it was idle and is on its way back, or has ended.
            Err(TrySendError::Full(waiting)) => {
                let _ = self.batches.send(waiting);
                Ok(())
            }
            Err(TrySendError::Disconnected(_)) => {
                self.shared.over.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_goes_by_what_was_written_last() {
        let shared = Arc::new(Shared::default());
        let sink = TouchSink(shared.clone());
        assert_eq!(sink.window(), Window::default());
        shared.wrote(TELLING_BYTES - 1, Duration::from_millis(1));
        assert_eq!(sink.window(), Window::default(), "little says little");
        shared.wrote(20 << 20, Duration::from_secs(2));
        assert_eq!(sink.window().bytes_per_second, 10 << 20);
        shared.wrote(20 << 20, Duration::from_secs(4));
        assert_eq!(sink.window().bytes_per_second, 5 << 20);
    }
}
