//! What is counted of stored checkpoints.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hotspare_store::Name;

use super::page::Page;
use super::{Counter, Histogram};
use crate::history::now_ms;
use crate::report::size;

/// Of the store.
#[derive(Debug)]
pub struct StoreMeter {
    checkpoints: Counter,
    bytes: Counter,
    failures: Counter,
    took: Histogram,
    /// Gathered and not written yet.
    pub waiting_bytes: Counter,
    /// When the newest that is stored was taken, in milliseconds since 1970; 0: there is none.
    newest_ms: Counter,
    newest_epoch: Counter,
    trouble: Mutex<Option<String>>,
}

impl Default for StoreMeter {
    fn default() -> Self {
        let counter = Counter::default;
        Self {
            checkpoints: counter(),
            bytes: counter(),
            failures: counter(),
            took: Histogram::of_times(),
            waiting_bytes: counter(),
            newest_ms: counter(),
            newest_epoch: counter(),
            trouble: Mutex::default(),
        }
    }
}

impl StoreMeter {
    /// A checkpoint is stored.
    pub fn stored(&self, name: &Name, took: Duration) {
        self.checkpoints.add(1);
        self.bytes.add(name.bytes);
        self.took.time(took);
        self.newest_ms.set(name.time_ms);
        self.newest_epoch.set(name.epoch);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// One could not be.
    pub fn failed(&self, why: &str) {
        self.failures.add(1);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_owned());
    }

    /// Whether one has been stored so far.
    pub fn is_first(&self) -> bool {
        self.checkpoints.get() == 1
    }

    /// How it stands, for people.
    pub fn words(&self) -> String {
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let last = match self.newest_ms.get() {
            0 => "nothing is stored yet".to_owned(),
            at => format!(
                "checkpoint {} is stored, {:.1} s old",
                self.newest_epoch.get(),
                now_ms().saturating_sub(at) as f64 / 1000.0
            ),
        };
        match trouble {
            Some(why) => format!(
                "NOT STORED at this time ({}); {last}; {} wait",
                why,
                size(self.waiting_bytes.get())
            ),
            None => last,
        }
    }

    /// In Prometheus' text format.
    pub fn show(&self, page: &mut Page) {
        let name = "hotspare_stored_checkpoint_age_seconds";
        page.head(name, "gauge", "Age of the newest checkpoint in the store.");
        if let newest @ 1.. = self.newest_ms.get() {
            page.value(name, &[], now_ms().saturating_sub(newest) as f64 / 1000.0);
        }
        let name = "hotspare_store_waiting_bytes";
        page.head(name, "gauge", "Bytes of pages and file changes that wait to be stored.");
        page.value(name, &[], self.waiting_bytes.get() as f64);
        let failing = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let name = "hotspare_store_failing";
        page.head(name, "gauge", "1 if checkpoints cannot be stored at this time.");
        page.value(name, &[], f64::from(failing));
        for (name, help, counter) in [
            ("hotspare_stored_total", "Checkpoints that were stored.", &self.checkpoints),
            ("hotspare_stored_bytes_total", "Bytes that were stored.", &self.bytes),
            ("hotspare_store_failures_total", "Attempts to store that failed.", &self.failures),
        ] {
            page.head(name, "counter", help);
            page.value(name, &[], counter.get() as f64);
        }
        let name = "hotspare_store_seconds";
        page.head(name, "histogram", "How long it took to store a checkpoint.");
        page.histogram(name, None, &self.took);
    }
}
