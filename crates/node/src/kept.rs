//! What a spare has kept: the memory of the ghost that it had when it came to the primary it
//! follows now.
//!
//! That ghost is of no use by itself, since the guest has gone on without it. But nearly all its
//! pages are what the guest has, too: the spare tells their digests, and what the primary finds
//! among them it does not send ([`hotspare_replica::kept`]). The ghost stays until the first
//! checkpoint of the new stream is whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use anyhow::ensure;
use hotspare_image::memory::PAGE_BYTES;
use hotspare_kernel::HostPid;
use hotspare_kernel::memory::{self, ProcMem};
use hotspare_process::ghost::copy::{self, GhostMemory};
use hotspare_process::pages::{Content, PageRun};
use hotspare_replica::kept::{DIGESTS_MAX, Digest, DigestKey, KEPT_MAX, digest};
use hotspare_replica::message::VERSION_OF_KEPT;
use hotspare_replica::pages::is_zero;
use hotspare_replica::{Keeper, Replier, WriteHalf, heartbeat};

use crate::agent::{Agent, Message, StreamId};

/// How long the owner of the ghost may be busy with something else.
const PATIENCE: Duration = Duration::from_secs(10);
/// Digests told at once: a MiB of pages, so that the primary can begin soon.
const TOGETHER: usize = 256;
const _: () = assert!(TOGETHER <= DIGESTS_MAX);

/// Pages of an older ghost, by the numbers under which they were told. All clones are one.
#[derive(Clone)]
pub struct Kept(Arc<Mutex<Pages>>);

struct Pages {
    key: DigestKey,
    objects: Vec<File>,
    told: Vec<(Place, Digest)>,
    is_over: bool,
}

/// Where a page is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Process(HostPid, u64),
    Object(usize, u64),
}

impl Kept {
    /// Tells the primary of a stream what is here of its guest, on a thread of its own, if that
    /// listens to such things.
    pub fn tell(
        agent: &Agent,
        (stream, version): (StreamId, u32),
        replier: &Arc<Mutex<Replier<WriteHalf>>>,
    ) -> Option<Self> {
        let listens = version >= VERSION_OF_KEPT;
        let told = listens.then(|| Self::begin(agent, stream, replier))?;
        told.inspect_err(|error| tracing::debug!(%error, "nothing is told as kept")).ok()
    }

    fn begin(
        agent: &Agent,
        stream: StreamId,
        replier: &Arc<Mutex<Replier<WriteHalf>>>,
    ) -> io::Result<Self> {
        let key = heartbeat::fresh_key()?;
        let (objects, told) = Default::default();
        let kept = Self(Arc::new(Mutex::new(Pages { key, objects, told, is_over: false })));
        let (agent, replier, teller) = (agent.clone(), replier.clone(), kept.clone());
        let tell = move || {
            let (answer, memory) = mpsc::channel();
            agent.owner.send(Message::Keep(stream, answer));
            if let Ok(memory) = memory.recv_timeout(PATIENCE)
                && let Err(why) = teller.tell_all(memory, &key, &replier)
            {
                tracing::debug!("no more is told of what is kept: {why:#}");
            }
            // A primary that is gone does not hear it.
            let _ = send(&replier, &key, &[]);
        };
        std::thread::Builder::new().name("kept".into()).spawn(tell)?;
        Ok(kept)
    }

    /// The ghost is about to make room for another one.
    pub fn end(&self) {
        let mut pages = self.lock();
        pages.is_over = true;
        (pages.objects, pages.told) = Default::default();
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell_all(
        &self,
        memory: GhostMemory,
        key: &DigestKey,
        replier: &Mutex<Replier<WriteHalf>>,
    ) -> anyhow::Result<()> {
        let mut teller = Teller { kept: self, key, replier, batch: Vec::new() };
        for (holder, space) in &memory.spaces {
            let place = |at| Place::Process(*holder, at);
            copy::read_space(*holder, space, &mut |run| teller.take(&run, place))?;
        }
        for (index, (id, object)) in memory.shared.into_iter().enumerate() {
            let object = File::from(object);
            self.lock().objects.push(object.try_clone()?);
            let place = |at| Place::Object(index, at);
            copy::read_shared(id, &object, &mut |run| teller.take(&run, place))?;
        }
        teller.flush()
    }
}

/// Tells page after page.
struct Teller<'a> {
    kept: &'a Kept,
    key: &'a DigestKey,
    replier: &'a Mutex<Replier<WriteHalf>>,
    batch: Vec<(Place, Digest)>,
}

impl Teller<'_> {
    fn take(&mut self, run: &PageRun, place: impl Fn(u64) -> Place) -> anyhow::Result<()> {
        let Content::Bytes(bytes) = &run.content else { return Ok(()) };
        let pages = bytes.chunks_exact(PAGE_BYTES as usize);
        for (page, at) in pages.zip((run.start..).step_by(PAGE_BYTES as usize)) {
            if !is_zero(page) {
                self.batch.push((place(at), digest(self.key, page)));
            }
            if self.batch.len() == TOGETHER {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Whoever is told of a page can ask for it.
    fn flush(&mut self) -> anyhow::Result<()> {
        let digests: Vec<Digest> = self.batch.iter().map(|(_, digest)| *digest).collect();
        if digests.is_empty() {
            return Ok(());
        }
        let mut pages = self.kept.lock();
        ensure!(!pages.is_over, "the checkpoint is here");
        ensure!(pages.told.len() + digests.len() <= KEPT_MAX, "these are {KEPT_MAX} pages");
        pages.told.append(&mut self.batch);
        drop(pages);
        Ok(send(self.replier, self.key, &digests)?)
    }
}

fn send(
    replier: &Mutex<Replier<WriteHalf>>,
    key: &DigestKey,
    digests: &[Digest],
) -> io::Result<()> {
    replier.lock().unwrap_or_else(PoisonError::into_inner).kept(key, digests)
}

impl Keeper for Kept {
    fn page(&mut self, number: u32, page: &mut [u8]) -> io::Result<()> {
        let pages = self.lock();
        let told = pages.told.get(number as usize);
        let (place, expected) =
            *told.ok_or_else(|| io::Error::other(format!("page {number} was never told")))?;
        match place {
            Place::Process(holder, at) => read(holder, at, page)?,
            Place::Object(index, at) => pages.objects[index].read_exact_at(page, at)?,
        }
        if digest(&pages.key, page) != expected {
            return Err(io::Error::other(format!("page {number} has changed ({place:?})")));
        }
        Ok(())
    }
}

fn read(holder: HostPid, at: u64, page: &mut [u8]) -> io::Result<()> {
    let got = memory::read(holder, &[(at, page.len())], page).map_err(io::Error::other)?;
    if got == page.len() {
        return Ok(());
    }
    // Memory that its owner may not read, either.
    ProcMem::open(holder).and_then(|open| open.read_exact(at, page)).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: DigestKey = [3; 32];

    fn kept(told: Vec<(Place, Digest)>, objects: Vec<File>) -> Kept {
        Kept(Arc::new(Mutex::new(Pages { key: KEY, objects, told, is_over: false })))
    }

    #[test]
    fn what_has_changed_since_it_was_told_is_not_given() {
        let own = HostPid(std::process::id() as i32);
        let mut memory = vec![5u8; 2 * 4096];
        let place = Place::Process(own, memory.as_ptr() as u64);
        let mut kept = kept(vec![(place, digest(&KEY, &memory[..4096]))], Vec::new());
        let mut page = [0; 4096];
        kept.page(0, &mut page).expect("is there");
        assert_eq!(page[..], memory[..4096]);
        assert!(kept.page(1, &mut page).is_err(), "was never told");
        memory[17] = 6;
        std::hint::black_box(&mut memory);
        assert!(kept.page(0, &mut page).unwrap_err().to_string().contains("changed"));
        memory[17] = 5;
        std::hint::black_box(&mut memory);
        kept.page(0, &mut page).expect("is there again");
        kept.end();
        assert!(kept.page(0, &mut page).is_err(), "another ghost is there");
    }

    #[test]
    fn shared_memory_is_read_from_its_object() {
        let object = tempfile::tempfile().expect("a file");
        object.write_all_at(&[7; 4096], 8192).expect("writes");
        let told = vec![(Place::Object(0, 8192), digest(&KEY, &[7; 4096]))];
        let mut page = [0; 4096];
        kept(told, vec![object]).page(0, &mut page).expect("is there");
        assert_eq!(page, [7; 4096]);
    }
}
