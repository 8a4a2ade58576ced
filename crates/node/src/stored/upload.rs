//! The thread `store-writer`: into the store, however long that takes.

use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::Checkpoint;
use hotspare_process::lazy::needed_at_once;
use hotspare_store::{About, Batch, Catalogue, Store, StoreError, StoreResult, Stored, Writer};

use super::StoreSettings;
use super::sink::Shared;
use crate::agent::Agent;
use crate::history::{What, now_ms};
use crate::report::size;

/// First and longest wait before a write is tried again.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(30);
/// How often chains are looked at and old checkpoints deleted.
const TIDY: Duration = Duration::from_secs(60);

/// The writer and what it knows.
pub struct Upload {
    agent: Agent,
    guest: String,
    settings: StoreSettings,
    shared: Arc<Shared>,
    opened: Option<Store>,
    writer: Option<Writer>,
    catalogue: Catalogue,
    /// When the store was last looked at as a whole.
    looked: Option<Instant>,
    tidied: Instant,
    /// What is wrong, as it was told.
    trouble: Option<String>,
}

impl Upload {
    /// Does not connect yet.
    pub fn new(
        agent: &Agent,
        guest: &str,
        settings: StoreSettings,
        shared: Arc<Shared>,
    ) -> StoreResult<Self> {
        // A key that cannot be read is said now.
        settings.key()?;
        Ok(Self {
            agent: agent.clone(),
            guest: guest.to_owned(),
            settings,
            shared,
            opened: None,
            writer: None,
            catalogue: Catalogue::default(),
            looked: None,
            tidied: Instant::now(),
            trouble: None,
        })
    }

    /// Writes what comes, until nothing comes any more or another host writes.
    pub fn run(&mut self, batches: &Receiver<(Batch, About)>) {
        loop {
            self.shared.idle.store(true, Ordering::Relaxed);
            let Ok((batch, about)) = batches.recv() else { return };
            self.shared.idle.store(false, Ordering::Relaxed);
            if !self.write(&batch, &about) {
                self.shared.over.store(true, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Writes until it is written; false if it never will be.
    fn write(&mut self, batch: &Batch, about: &About) -> bool {
        let mut wait = AGAIN;
        loop {
            let began = Instant::now();
            let error = match self.try_write(batch, about) {
                Ok(Some(stored)) => {
                    self.stored(&stored, began.elapsed());
                    self.tidy();
                    return true;
                }
                // A full one comes.
                Ok(None) => {
                    self.shared.begin_anew();
                    return true;
                }
                Err(error) => error,
            };
            self.looked = None;
            let text = error.to_string();
            self.agent.meters.store.failed(&text);
            if let StoreError::Fenced(_) = error {
                self.tell_trouble(&text);
                return false;
            }
            self.tell_trouble(&text);
            if self.shared.over.load(Ordering::Relaxed) {
                return false;
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(AGAIN_MAX);
        }
    }

    fn tell_trouble(&mut self, text: &str) {
        if self.trouble.as_deref() == Some(text) {
            return;
        }
        self.trouble = Some(text.to_owned());
        self.agent
            .reporter
            .alarm(&format!("CHECKPOINTS ARE NOT STORED, the guest and its spares go on: {text}"));
        let face = self.agent.face();
        let at = (face.term, face.epoch);
        drop(face);
        self.agent.remember(at, What::NotStored { why: text.to_owned() });
    }

    fn stored(&mut self, stored: &Stored, took: Duration) {
        let name = &stored.name;
        self.agent.meters.store.stored(name, took);
        tracing::debug!(name.epoch, name.bytes, stored.objects, ?took, "stored");
        let first = self.looked.is_none();
        self.looked.get_or_insert_with(Instant::now);
        if self.trouble.take().is_some() || first && self.agent.meters.store.is_first() {
            let term = self.agent.face().term;
            self.agent.remember((term, name.epoch), What::Stored { bytes: name.bytes });
            self.agent.reporter.note(&format!(
                "checkpoint {} is stored ({}) in {}, and from now on one every {:?}",
                name.epoch,
                size(name.bytes),
                self.settings.address,
                self.settings.every
            ));
        }
    }

    /// `None` if it has nothing to stand on.
    fn try_write(&mut self, batch: &Batch, about: &About) -> StoreResult<Option<Stored>> {
        if self.writer.is_none() {
            let store = match &self.opened {
                Some(store) => store.clone(),
                None => self.opened.insert(self.settings.open()?).clone(),
            };
            let store = match &self.agent.memory {
                Some(memory) => store.with_memory(memory.clone()),
                None => store,
            };
            let host = nix::unistd::gethostname()
                .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned());
            let term = self.agent.face().term.0;
            let lineage = self.settings.lineage.clone();
            let at_point = Box::new(|_| Ok(()));
            let run = (lineage.as_str(), term);
            let mut writer = Writer::claim(store, &self.guest, run, &host, at_point)?;
            match writer.sweep() {
                Ok(swept) => tracing::debug!(swept, "packs of writers that died are gone"),
                Err(error) => tracing::debug!(%error, "the store was not swept"),
            }
            self.writer = Some(writer);
        }
        let Some(writer) = &mut self.writer else { return Ok(None) };
        if self.looked.is_none_or(|looked| looked.elapsed() > TIDY) {
            self.catalogue = writer.store().catalogue(&self.guest)?;
            self.looked = Some(Instant::now());
        }
        if !batch.whole && !writer.can_go_on(&self.catalogue)? {
            self.agent.reporter.warn(
                "the store has lost what its checkpoints of this guest stand on: a full one is \
                 stored",
            );
            return Ok(None);
        }
        let began = Instant::now();
        let stored = writer.store_batch(batch, about.clone())?;
        self.shared.wrote(batch.page_bytes(), began.elapsed());
        self.catalogue.add(stored.name);
        self.put_touched(&batch.state);
        Ok(Some(stored))
    }

    /// Beside the checkpoint, what the guest was seen to touch, and what of this state is needed
    /// whatever it touches. Nothing depends on it.
    fn put_touched(&self, state: &[u8]) {
        let touched = self.shared.touched.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(mut touched), Some(writer)) = (touched, &self.writer) else { return };
        if let Ok(checkpoint) = Checkpoint::from_bytes(state) {
            touched.needed = needed_at_once(&checkpoint);
        }
        let put = writer.store().put_touches(&self.guest, writer.reign(), &touched);
        if let Err(error) = put {
            tracing::debug!(%error, "what the guest touches is not stored this time");
        }
    }

    /// Folds long chains and deletes what nobody keeps.
    fn tidy(&mut self) {
        if self.tidied.elapsed() < TIDY.min(self.settings.every * 10) {
            return;
        }
        self.tidied = Instant::now();
        if let Err(error) = self.try_tidy() {
            self.looked = None;
            self.agent.reporter.warn(&format!(
                "old stored checkpoints could not be tidied, and are kept for now: {error}"
            ));
        }
    }

    fn try_tidy(&mut self) -> StoreResult<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        match writer.fold(&self.catalogue)? {
            Some(folded) => self.catalogue.add(folded.name),
            None if writer.wants_whole(&self.catalogue) => self.shared.begin_anew(),
            None => {}
        }
        let gone = writer.forget(&mut self.catalogue, &self.settings.keep, now_ms())?;
        if gone > 0 {
            tracing::debug!(gone, "stored checkpoints were deleted");
        }
        Ok(())
    }
}
