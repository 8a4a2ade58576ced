//! Tracks what the guest touches after a checkpoint, every now and then, for the next restore.
//!
//! The main thread clears the notes before a checkpoint and hands the window over; the thread
//! `touches` looks at page tables until it is over, and gives the outcome to the store.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hotspare_image::touch::TouchSet;
use hotspare_kernel::accessed::PageTables;
use hotspare_process::capture::touch::Touches;
use hotspare_process::guest::Guest;
use hotspare_process::lazy::steady;
use hotspare_process::objects::error::ObjectError;

use crate::report::Reporter;
use crate::stored::TouchSink;

/// How windows follow each other.
pub struct Tracking {
    every: Duration,
    next: Instant,
    /// For the next window; away while one is open.
    tables: Option<PageTables>,
    windows: Sender<Opened>,
    back: Receiver<PageTables>,
    reporter: Reporter,
    /// The notes were cleared for the checkpoint under way, in this time.
    cleared: Option<Duration>,
}

/// A window, and how long the guest's notes took to clear for it.
type Opened = (Touches, Duration);

impl Tracking {
    /// Starts the thread; none where the kernel does not let page tables be read, which is told.
    pub fn start(every: Duration, sink: TouchSink, reporter: &Reporter) -> Option<Self> {
        let tables = PageTables::open();
        let tables = tables.inspect_err(|error| {
            reporter.warn(&format!(
                "what the guest touches cannot be tracked on this kernel, so a restore fetches \
                 memory as it is asked for: {error}"
            ));
        });
        let (windows, open) = channel();
        let (give_back, back) = channel();
        let tables = tables.ok()?;
        let teller = reporter.clone();
        let watch = move || watch(&open, &give_back, &sink, &teller);
        let thread = std::thread::Builder::new().name("touches".into()).spawn(watch);
        thread.inspect_err(|error| tell(reporter, error)).ok()?;
        Some(Self {
            every,
            next: Instant::now(),
            tables: Some(tables),
            windows,
            back,
            reporter: reporter.clone(),
            cleared: None,
        })
    }

    /// The guest is about to be stopped for a checkpoint.
    pub fn before(&mut self, guest: &mut Guest) {
        if let Ok(tables) = self.back.try_recv() {
            self.tables = Some(tables);
        }
        if self.tables.is_none() || self.cleared.is_some() || self.next > Instant::now() {
            return;
        }
        let began = processor_time();
        match guest.forget_touches() {
            Ok(()) => self.cleared = Some(processor_time().saturating_sub(began)),
            Err(error) => self.give_up(&error),
        }
    }

    /// The checkpoint has been taken.
    pub fn after(&mut self, guest: &mut Guest) {
        let Some(cleared) = self.cleared.take() else { return };
        self.next = Instant::now() + self.every;
        let Some(tables) = self.tables.take() else { return };
        match guest.begin_touches(tables) {
            Ok(window) => drop(self.windows.send((window, cleared))),
            Err(error) => self.give_up(&error),
        }
    }

    fn give_up(&mut self, why: &ObjectError) {
        self.tables = None;
        tell(&self.reporter, why);
    }
}

/// What the calling thread has used of a processor: what it waited for others is no cost of ours.
fn processor_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    clock.now().map_or(Duration::ZERO, Duration::from)
}

fn tell(reporter: &Reporter, why: &dyn Display) {
    reporter.warn(&format!(
        "what the guest touches is not tracked any more, so a restore fetches memory in the order \
         of an older checkpoint, or as it is asked for: {why}"
    ));
}

/// Watches windows until there are no more. After a failure the page tables are not given back, so
/// none follows.
fn watch(
    open: &Receiver<Opened>,
    give_back: &Sender<PageTables>,
    sink: &TouchSink,
    reporter: &Reporter,
) {
    let mut last = TouchSet::default();
    while let Ok((mut touches, clearing)) = open.recv() {
        let window = sink.window();
        let (began, before) = (Instant::now(), processor_time());
        let mut looked = Ok(Duration::ZERO);
        while looked.is_ok() && !touches.is_over(&window) {
            let due = touches.next_look().saturating_duration_since(Instant::now());
            std::thread::sleep(due.min(Duration::from_millis(100)));
            if touches.next_look() <= Instant::now() {
                looked = touches.look();
            }
        }
        match looked.and_then(|_| touches.look()) {
            Ok(_) => {
                let looking = processor_time().saturating_sub(before);
                let lasted = began.elapsed();
                let (mut touched, tables) = touches.end();
                touched.steady = steady(&last, &touched);
                last.clone_from(&touched);
                reporter.tracked(touched.pages(), clearing, looking, lasted);
                sink.put(touched);
                let _ = give_back.send(tables);
            }
            Err(error) => tell(reporter, &error),
        }
    }
}
