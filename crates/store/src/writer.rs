//! Writes checkpoints, one after another, as the only one who does.

use hotspare_image::memory::PAGE_BYTES;
use minicbor::{Decode, Encode};

use crate::bucket::Bucket;
use crate::error::{StoreError, StoreResult};
use crate::extents::Run;
use crate::gather::Batch;
use crate::manifest::{About, BLOCK_BYTES, BLOCK_PAGES, Block, Manifest, envelope, open_envelope};
use crate::names::{Base, Name};
use crate::nearby::PackMemory;
use crate::pages::Held;
use crate::reader::{Catalogue, Store};
use crate::retention::Keep;
use crate::seal::{self, Key};

/// A pack is written when it has so many bytes.
const PACK_BYTES: usize = 32 << 20;
/// What nobody has named for so long was left behind by a writer that died.
const LEFT_BEHIND: std::time::Duration = std::time::Duration::from_secs(3600);

/// Moments between two steps, at each of which a writer may die and nothing is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    /// The reign is claimed.
    Claimed,
    /// A pack is written.
    Pack,
    /// All packs are, the manifest is not.
    Packs,
    /// The manifest is written.
    Stored,
    /// A chain has been folded into a whole checkpoint.
    Folded,
    /// A manifest that nobody keeps is deleted, its packs are not.
    Forgotten,
    /// A pack is deleted.
    PackDeleted,
}

impl Point {
    /// All of them.
    pub const ALL: [Point; 7] = [
        Point::Claimed,
        Point::Pack,
        Point::Packs,
        Point::Stored,
        Point::Folded,
        Point::Forgotten,
        Point::PackDeleted,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Point::Claimed => "claimed",
            Point::Pack => "pack",
            Point::Packs => "packs",
            Point::Stored => "stored",
            Point::Folded => "folded",
            Point::Forgotten => "forgotten",
            Point::PackDeleted => "pack-deleted",
        }
    }
}

/// Who writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct ReignRecord {
    /// One run of a guest, with all its failovers, has one name.
    #[n(0)]
    pub lineage: String,
    /// Reign of the primary among its spares.
    #[n(1)]
    pub term: u64,
    /// The host.
    #[n(2)]
    pub host: String,
    /// Since when: milliseconds since 1970.
    #[n(3)]
    pub since_ms: u64,
}

/// What storing a checkpoint came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub name: Name,
    /// Objects that were written.
    pub objects: u64,
}

/// Called at each point; an error is a death.
pub type AtPoint = Box<dyn FnMut(Point) -> StoreResult<()> + Send>;

/// The only one who stores checkpoints of a guest, until a newer one claims the next reign.
pub struct Writer {
    store: Store,
    guest: String,
    reign: u64,
    /// The last one that was stored.
    last: Option<u64>,
    attempt: u32,
    at_point: AtPoint,
}

/// Bytes of pages in a full block.
const PAGES_BYTES: usize = (BLOCK_PAGES * PAGE_BYTES) as usize;

/// What a pack is being filled with.
struct Packing<'a> {
    bucket: &'a Bucket,
    memory: Option<&'a PackMemory>,
    key: Option<&'a Key>,
    folder: &'a str,
    name: Name,
    bytes: Vec<u8>,
    /// Pages that do not fill a block yet.
    pages: Vec<u8>,
    manifest: Manifest,
    objects: u64,
    at_point: &'a mut AtPoint,
}

impl Packing<'_> {
    fn pack_name(&self) -> String {
        let pack = self.name.pack(self.manifest.attempt, self.manifest.packs.len());
        format!("{}/packs/{pack}", self.folder)
    }

    fn add(&mut self, raw: &[u8]) -> StoreResult<Block> {
        let (object, offset) = (self.pack_name(), self.bytes.len() as u64);
        let stored = seal::pack(raw, self.key, &object, offset)?;
        let block = Block {
            pack: self.manifest.packs.len() as u32,
            offset,
            stored: stored.len() as u32,
            raw: raw.len() as u32,
            hash: seal::hash(&stored),
        };
        self.bytes.extend(stored);
        if self.bytes.len() >= PACK_BYTES {
            self.flush()?;
        }
        Ok(block)
    }

    /// For pages of so many bytes, or fewer if the block is full before; to be followed by
    /// [`Packing::pages_added`].
    fn room_for(&mut self, bytes: u64) -> &mut [u8] {
        let from = self.pages.len();
        self.pages.resize(PAGES_BYTES.min(from.saturating_add(bytes as usize)), 0);
        &mut self.pages[from..]
    }

    fn pages_added(&mut self) -> StoreResult<()> {
        if self.pages.len() == PAGES_BYTES { self.end_pages() } else { Ok(()) }
    }

    /// Whatever comes next is not pages.
    fn end_pages(&mut self) -> StoreResult<()> {
        if self.pages.is_empty() {
            return Ok(());
        }
        let pages = std::mem::take(&mut self.pages);
        let block = self.add(&pages)?;
        self.manifest.blocks.push(block);
        self.pages = pages;
        self.pages.clear();
        Ok(())
    }

    /// The state, and the end.
    fn finish(mut self, state: &[u8]) -> StoreResult<(Name, Manifest, u64)> {
        self.manifest.state = self.add_all(state.len() as u64, BLOCK_BYTES, |at, bytes| {
            let at = at as usize;
            bytes.copy_from_slice(&state[at..at + bytes.len()]);
            Ok(())
        })?;
        self.flush()?;
        Ok((self.name, self.manifest, self.objects))
    }

    fn flush(&mut self) -> StoreResult<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let object = self.pack_name();
        let bytes = std::mem::take(&mut self.bytes);
        let length = bytes.len() as u64;
        let kept = self.memory.map(|_| bytes.clone());
        self.bucket.put(&object, bytes)?;
        if let (Some(memory), Some(kept)) = (self.memory, kept) {
            memory.keep(&object, kept);
        }
        self.objects += 1;
        self.manifest.packs.push(length);
        self.name.bytes += length;
        (self.at_point)(Point::Pack)
    }

    /// All that is to be read in pieces of at most `most` bytes.
    fn add_all(
        &mut self,
        bytes: u64,
        most: usize,
        mut read: impl FnMut(u64, &mut [u8]) -> StoreResult<()>,
    ) -> StoreResult<Vec<Block>> {
        let mut blocks = Vec::new();
        let mut buffer = vec![0; most];
        let mut at = 0;
        while at < bytes {
            let piece = (bytes - at).min(most as u64) as usize;
            read(at, &mut buffer[..piece])?;
            blocks.push(self.add(&buffer[..piece])?);
            at += piece as u64;
        }
        Ok(blocks)
    }
}

/// Now, in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_millis() as u64)
}

impl Writer {
    /// Claims the next reign over the guest's checkpoints. `lineage` names the run that the guest
    /// belongs to: within it a claim of an older term than the last one's is refused, since that
    /// host has been replaced.
    pub fn claim(
        store: Store,
        guest: &str,
        (lineage, term): (&str, u64),
        host: &str,
        at_point: AtPoint,
    ) -> StoreResult<Self> {
        let guest_name = guest.to_owned();
        let mut writer =
            Self { store, guest: guest_name, reign: 0, last: None, attempt: 0, at_point };
        loop {
            let newest = writer.store.reigns(guest)?.last().copied().unwrap_or(0);
            if newest > 0 {
                let record = writer.store.reign(guest, newest)?;
                if record.lineage == lineage && record.term >= term {
                    return Err(StoreError::Fenced(newest));
                }
            }
            writer.reign = newest + 1;
            let record = ReignRecord {
                lineage: lineage.to_owned(),
                term,
                host: host.to_owned(),
                since_ms: now_ms(),
            };
            let raw =
                minicbor::to_vec(&record).map_err(|error| StoreError::Local(error.to_string()))?;
            let name = reign_name(guest, writer.reign);
            if writer.store.bucket.create(&name, envelope(&raw, &name, None)?)? {
                (writer.at_point)(Point::Claimed)?;
                return Ok(writer);
            }
        }
    }

    /// Its reign.
    pub fn reign(&self) -> u64 {
        self.reign
    }

    /// The store it writes to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Nobody has claimed a newer reign.
    fn require_reign(&self) -> StoreResult<()> {
        let next = self.reign + 1;
        match self.store.bucket.is_there(&reign_name(&self.guest, next))? {
            true => Err(StoreError::Fenced(next)),
            false => Ok(()),
        }
    }

    fn name(&self, epoch: u64, time_ms: u64, base: Base) -> Name {
        Name { reign: self.reign, epoch, base, time_ms, bytes: 0 }
    }

    fn packing<'a>(
        store: &'a Store,
        folder: &'a str,
        (name, attempt): (Name, u32),
        about: About,
        at_point: &'a mut AtPoint,
    ) -> Packing<'a> {
        let base = match name.base {
            Base::Whole => None,
            Base::Epoch(epoch) => Some(epoch),
        };
        let manifest = Manifest { about, reign: name.reign, base, attempt, ..Manifest::default() };
        let (bucket, key, bytes, objects) = (&store.bucket, store.key.as_ref(), Vec::new(), 0);
        let pages = Vec::with_capacity(PAGES_BYTES);
        let memory = store.memory.as_deref();
        Packing { bucket, memory, key, folder, name, bytes, pages, manifest, objects, at_point }
    }

    /// Stores a checkpoint. After an error the same can be tried again, unless this writer is
    /// [`StoreError::Fenced`].
    pub fn store_batch(&mut self, batch: &Batch, about: About) -> StoreResult<Stored> {
        let about = About {
            guest: self.guest.clone(),
            position: batch.position,
            term: batch.term,
            time_ms: batch.time_ms,
            ..about
        };
        let base = match (batch.whole, self.last) {
            (true, _) => Base::Whole,
            (false, Some(last)) => Base::Epoch(last),
            (false, None) => {
                return Err(StoreError::Local("there is nothing that it could stand on".into()));
            }
        };
        let folder = folder(&self.guest);
        let name = self.name(batch.position.epoch.0, batch.time_ms, base);
        self.attempt += 1;
        let Self { store, at_point, attempt, .. } = self;
        let mut packing = Self::packing(store, &folder, (name, *attempt), about, at_point);
        packing.manifest.list(&batch.pages);
        let read_failed = StoreError::local("read what waits for the store");
        for owned in batch.pages.0.values() {
            for (_, pages, held) in owned.pages.iter() {
                let Held::At(slot) = held else { continue };
                let mut done = 0;
                while done < pages {
                    let room = packing.room_for((pages - done) * PAGE_BYTES);
                    batch.read_pages(slot.after(done), room).map_err(&read_failed)?;
                    done += room.len() as u64 / PAGE_BYTES;
                    packing.pages_added()?;
                }
            }
        }
        packing.end_pages()?;
        packing.manifest.changes =
            packing.add_all(batch.changes_bytes, BLOCK_BYTES, |at, bytes| {
                batch.read_changes(at, bytes).map_err(&read_failed)
            })?;
        let (name, manifest, objects) = packing.finish(&batch.state)?;
        self.name_it(name, &manifest)?;
        self.last = Some(batch.position.epoch.0);
        Ok(Stored { name, objects: objects + 1 })
    }

    /// From here on it is there.
    fn name_it(&mut self, name: Name, manifest: &Manifest) -> StoreResult<()> {
        (self.at_point)(Point::Packs)?;
        self.require_reign()?;
        let object = format!("{}/checkpoints/{}", folder(&self.guest), name.manifest());
        let bytes = manifest.seal(&object, self.store.key.as_ref())?;
        if !self.store.bucket.create(&object, bytes)? {
            // An earlier attempt has come to something, though the store did not say so: it has
            // packs of its own.
            let there = self.store.manifest(&self.guest, name)?;
            if there.attempt != manifest.attempt {
                self.delete_packs(name, manifest)?;
            }
        }
        (self.at_point)(Point::Stored)
    }

    fn delete_packs(&mut self, name: Name, manifest: &Manifest) -> StoreResult<()> {
        for number in 0..manifest.packs.len() {
            let pack = name.pack(manifest.attempt, number);
            let object = format!("{}/packs/{pack}", folder(&self.guest));
            self.store.bucket.delete(&object)?;
            if let Some(memory) = &self.store.memory {
                memory.forget(&object);
            }
            (self.at_point)(Point::PackDeleted)?;
        }
        Ok(())
    }

    /// Makes a whole checkpoint of a chain, if it has grown long: so that a restart has little to
    /// read, and what came before can be forgotten. `None` if there is no need, or no way: changes
    /// of files are a history that only the guest's host can make short.
    pub fn fold(&mut self, catalogue: &Catalogue) -> StoreResult<Option<Stored>> {
        let Some(last) = self.last else { return Ok(None) };
        let own: Vec<Name> = catalogue.of_reign(self.reign).collect();
        let Some(chain) = catalogue.chain(self.reign, last) else { return Ok(None) };
        if !crate::retention::is_long(&chain) {
            return Ok(None);
        }
        let Some(end) = own.iter().find(|name| name.epoch == last) else { return Ok(None) };
        let loaded = self.store.load(&self.guest, catalogue, *end)?;
        if loaded.changes_bytes() > 0 {
            return Ok(None);
        }
        let folder = folder(&self.guest);
        let name = self.name(last, end.time_ms, Base::Whole);
        self.attempt += 1;
        let Self { store, at_point, attempt, .. } = self;
        let about = loaded.about().clone();
        let mut packing = Self::packing(store, &folder, (name, *attempt), about, at_point);
        packing.manifest.list(loaded.pages());
        loaded.each_in_order(|mut bytes| {
            while !bytes.is_empty() {
                let room = packing.room_for(bytes.len() as u64);
                let (now, after) = bytes.split_at(room.len());
                room.copy_from_slice(now);
                packing.pages_added()?;
                bytes = after;
            }
            Ok(())
        })?;
        packing.end_pages()?;
        let (name, manifest, objects) = packing.finish(loaded.state())?;
        self.name_it(name, &manifest)?;
        (self.at_point)(Point::Folded)?;
        Ok(Some(Stored { name, objects: objects + 1 }))
    }

    /// Whether what the next checkpoint would stand on is there.
    pub fn can_go_on(&self, catalogue: &Catalogue) -> StoreResult<bool> {
        let chain = self.last.and_then(|last| catalogue.chain(self.reign, last));
        let Some(last) = chain.and_then(|chain| chain.last().copied()) else { return Ok(false) };
        let object = format!("{}/checkpoints/{}", folder(&self.guest), last.manifest());
        self.store.bucket.is_there(&object)
    }

    /// Whether the file changes of the last chain have outgrown what they began with, so that a
    /// whole checkpoint by the guest's host is due.
    pub fn wants_whole(&self, catalogue: &Catalogue) -> bool {
        let chain = self.last.and_then(|last| catalogue.chain(self.reign, last));
        chain.is_some_and(|chain| crate::retention::is_very_long(&chain))
    }

    /// Deletes what nobody keeps at `now_ms`, milliseconds since 1970: manifests before their
    /// packs. Returns how many checkpoints are gone.
    pub fn forget(
        &mut self,
        catalogue: &mut Catalogue,
        keep: &Keep,
        now_ms: u64,
    ) -> StoreResult<u64> {
        let unwanted = keep.unwanted(catalogue, now_ms);
        if !unwanted.is_empty() {
            self.require_reign()?;
        }
        let folder = folder(&self.guest);
        let mut gone = 0;
        let reign = self.reign;
        for name in unwanted.iter().filter(|name| name.reign <= reign) {
            let object = format!("{folder}/checkpoints/{}", name.manifest());
            let manifest = match self.store.manifest(&self.guest, *name) {
                Ok(manifest) => manifest,
                // Its packs will be found without it.
                Err(StoreError::Damaged { .. } | StoreError::Missing(_)) => Manifest::default(),
                Err(error) => return Err(error),
            };
            self.store.bucket.delete(&object)?;
            catalogue.remove(*name);
            gone += 1;
            (self.at_point)(Point::Forgotten)?;
            self.delete_packs(*name, &manifest)?;
        }
        Ok(gone)
    }

    /// Deletes packs that no manifest names and that are old: of writers that died. Returns how
    /// many.
    pub fn sweep(&mut self) -> StoreResult<u64> {
        self.sweep_older(LEFT_BEHIND)
    }

    /// As [`Writer::sweep`], of packs of this age.
    pub fn sweep_older(&mut self, age: std::time::Duration) -> StoreResult<u64> {
        self.require_reign()?;
        let folder = folder(&self.guest);
        let packs = self.store.bucket.list(&format!("{folder}/packs"))?;
        // After the packs: what has been named meanwhile is seen.
        let catalogue = self.store.catalogue(&self.guest)?;
        let mut gone = 0;
        for pack in packs.iter().filter(|pack| pack.age >= age) {
            let Some((reign, epoch, whole)) = Name::owner_of_pack(&pack.name) else { continue };
            let named = catalogue
                .of_reign(reign)
                .any(|name| name.epoch == epoch && (name.base == Base::Whole) == whole);
            if !named && reign <= self.reign {
                self.store.bucket.delete(&format!("{folder}/packs/{}", pack.name))?;
                gone += 1;
            }
        }
        Ok(gone)
    }
}

pub(crate) fn folder(guest: &str) -> String {
    crate::names::folder(guest)
}

pub(crate) fn reign_name(guest: &str, reign: u64) -> String {
    format!("{}/reigns/{reign:06}", folder(guest))
}

/// Reads a record of a reign.
pub(crate) fn open_reign(bytes: &[u8], name: &str) -> StoreResult<ReignRecord> {
    let raw = open_envelope(bytes, name, None)?;
    minicbor::decode(&raw).map_err(|error| StoreError::damaged(name, 0, error.to_string()))
}
