//! What a stored checkpoint consists of, and the index of its pages.

use hotspare_image::files::FileIdentity;
use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_image::{Position, Term};
use minicbor::{Decode, Encode};

use crate::error::{StoreError, StoreResult};
use crate::extents::{Extents, Run as _};
use crate::pages::{Held, Pages, Part};
use crate::seal::{self, HASH_BYTES, Key};

/// Pages in a block: what is read at least.
pub const BLOCK_PAGES: u64 = 32;
/// Bytes of state or of file changes in a block.
pub const BLOCK_BYTES: usize = 256 << 10;
/// Most bytes of an unpacked manifest.
const MANIFEST_BYTES_MAX: u64 = 512 << 20;

const MAGIC: [u8; 4] = *b"HSst";
const VERSION: u16 = 1;
const ENCRYPTED: u16 = 1;
/// Magic, version, flags, unpacked length.
const HEAD_BYTES: usize = 16;
const DIGEST_BYTES: usize = 32;

/// A piece of a pack: bytes that are compressed, encrypted and checked as one.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Block {
    /// Which pack of the checkpoint.
    #[n(0)]
    pub pack: u32,
    /// Where in it.
    #[n(1)]
    pub offset: u64,
    /// Bytes there.
    #[n(2)]
    pub stored: u32,
    /// Bytes unpacked.
    #[n(3)]
    pub raw: u32,
    /// BLAKE3 of what is stored, its first 16 bytes.
    #[n(4)]
    #[cbor(with = "minicbor::bytes")]
    pub hash: [u8; HASH_BYTES],
}

/// A run of pages, by number. Those that are not zero lie one after another in the blocks of
/// pages, in the order of these runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct PageRun {
    /// Whose: an index of [`Manifest::owners`].
    #[n(0)]
    pub owner: u32,
    /// The first.
    #[n(1)]
    pub first: u64,
    /// How many.
    #[n(2)]
    pub pages: u64,
    /// All of them are zero.
    #[n(3)]
    pub zero: bool,
}

/// The host that a guest ran on, as far as a program can have seen it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Host {
    /// Release and version of the kernel.
    #[n(0)]
    pub kernel: String,
    /// Of the processor.
    #[n(1)]
    pub features: Vec<String>,
    /// What else must agree.
    #[n(2)]
    pub others: Vec<(String, String)>,
}

/// What is known of a checkpoint besides its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct About {
    /// Name of the guest.
    #[n(0)]
    pub guest: String,
    /// The checkpoint.
    #[n(1)]
    pub position: Position,
    /// Reign of the primary that took it, as its spares count.
    #[n(2)]
    pub term: Term,
    /// When: milliseconds since 1970.
    #[n(3)]
    pub time_ms: u64,
    /// Settings of the guest, names and values.
    #[n(4)]
    pub settings: Vec<(String, String)>,
    /// Where it ran.
    #[n(5)]
    pub host: Host,
    /// Files that must be alike wherever it goes on.
    #[n(6)]
    pub files: Vec<FileIdentity>,
}

/// A checkpoint in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Manifest {
    /// What it is.
    #[n(0)]
    pub about: About,
    /// Reign over this guest in the store.
    #[n(1)]
    pub reign: u64,
    /// The epoch of what it stands on; none: it is whole.
    #[n(2)]
    pub base: Option<u64>,
    /// Bytes of each of its packs.
    #[n(3)]
    pub packs: Vec<u64>,
    /// Blocks of the state.
    #[n(4)]
    pub state: Vec<Block>,
    /// Blocks of the file changes.
    #[n(5)]
    pub changes: Vec<Block>,
    /// Blocks of pages: each but the last has [`BLOCK_PAGES`].
    #[n(6)]
    pub blocks: Vec<Block>,
    /// Who has pages.
    #[n(7)]
    pub owners: Vec<PageOwner>,
    /// Pages of what it stands on that count no more.
    #[n(8)]
    pub gone: Vec<PageRun>,
    /// Pages that count.
    #[n(9)]
    pub runs: Vec<PageRun>,
    /// Number in the names of its packs.
    #[n(10)]
    pub attempt: u32,
}

/// Where a page is: in which checkpoint of a chain, and its place in the blocks of pages there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Which, counted from the whole one.
    pub link: u32,
    /// Number of the page among the pages in blocks.
    pub page: u64,
}

impl crate::extents::Run for Place {
    fn after(self, pages: u64) -> Self {
        Self { page: self.page + pages, ..self }
    }
}

impl Manifest {
    /// Its bytes in the store, as object `name`.
    pub fn seal(&self, name: &str, key: Option<&Key>) -> StoreResult<Vec<u8>> {
        let raw = minicbor::to_vec(self).map_err(|error| StoreError::Local(error.to_string()))?;
        envelope(&raw, name, key)
    }

    /// Reads what [`Manifest::seal`] wrote; checks that it is whole and makes sense.
    pub fn open(bytes: &[u8], name: &str, key: Option<&Key>) -> StoreResult<Self> {
        let raw = open_envelope(bytes, name, key)?;
        let manifest: Self = minicbor::decode(&raw)
            .map_err(|error| StoreError::damaged(name, HEAD_BYTES as u64, error.to_string()))?;
        manifest.check().map_err(|why| StoreError::damaged(name, HEAD_BYTES as u64, why))?;
        Ok(manifest)
    }

    /// Nothing in it points outside of it.
    fn check(&self) -> Result<(), String> {
        let blocks = self.state.iter().chain(&self.changes).chain(&self.blocks);
        for block in blocks {
            let pack = self.packs.get(block.pack as usize).copied().unwrap_or(0);
            let end = block.offset.checked_add(block.stored.into());
            if end.is_none_or(|end| end > pack) || block.raw as usize > BLOCK_BYTES {
                return Err(format!("a block at {} of pack {}", block.offset, block.pack));
            }
        }
        let full = BLOCK_PAGES * PAGE_BYTES;
        let last = self.blocks.len().saturating_sub(1);
        for (at, block) in self.blocks.iter().enumerate() {
            let raw = u64::from(block.raw);
            let sound = if at < last { raw == full } else { raw > 0 && raw <= full };
            if !sound || !raw.is_multiple_of(PAGE_BYTES) {
                return Err(format!("block {at} has {raw} bytes of pages"));
            }
        }
        let mut pages = 0u64;
        for run in self.runs.iter().chain(&self.gone) {
            let end = run.first.checked_add(run.pages);
            let fits = end.is_some_and(|end| end <= u64::MAX / PAGE_BYTES + 1) && run.pages > 0;
            if !fits || run.owner as usize >= self.owners.len() {
                return Err(format!("a run of {} pages at page {}", run.pages, run.first));
            }
        }
        for run in self.runs.iter().filter(|run| !run.zero) {
            pages = pages.saturating_add(run.pages);
        }
        let there: u64 = self.blocks.iter().map(|block| u64::from(block.raw) / PAGE_BYTES).sum();
        if pages != there {
            return Err(format!("{pages} pages are listed and {there} are there"));
        }
        if self.base.is_some_and(|base| base >= self.about.position.epoch.0) {
            return Err("it stands on a later one".into());
        }
        Ok(())
    }

    /// Its pages, as link number `link` of a chain.
    #[must_use]
    pub fn pages(&self, link: u32) -> Pages<Place> {
        let mut pages = Pages::default();
        let part = |run: &PageRun| Part {
            owner: self.owners[run.owner as usize],
            first: run.first,
            pages: run.pages,
        };
        let free = &mut |_, _| {};
        for run in &self.gone {
            pages.clear(part(run), free);
        }
        let mut at = Place { link, page: 0 };
        for run in &self.runs {
            let held = if run.zero { Held::Zero } else { Held::At(at) };
            pages.put(part(run), held, free);
            if !run.zero {
                at = at.after(run.pages);
            }
        }
        pages
    }

    /// Lists pages; their bytes go into blocks in this order.
    pub fn list<V: crate::extents::Run>(&mut self, pages: &Pages<V>) {
        for (owner, owned) in &pages.0 {
            let index = self.owners.len() as u32;
            self.owners.push(*owner);
            let run = |first, pages, zero| PageRun { owner: index, first, pages, zero };
            if self.base.is_some() {
                self.gone.extend(owned.gone.iter().map(|(at, n, ())| run(at, n, false)));
            }
            self.runs.extend(runs(&owned.pages).map(|(at, n, zero)| run(at, n, zero)));
        }
    }
}

/// Runs without their places: neighbours join.
fn runs<V: crate::extents::Run>(
    pages: &Extents<Held<V>>,
) -> impl Iterator<Item = (u64, u64, bool)> {
    let mut rest = pages.iter().map(|(at, n, held)| (at, n, matches!(held, Held::Zero))).peekable();
    std::iter::from_fn(move || {
        let (first, mut pages, zero) = rest.next()?;
        while let Some((_, more, _)) =
            rest.next_if(|next| (next.0, next.2) == (first + pages, zero))
        {
            pages += more;
        }
        Some((first, pages, zero))
    })
}

/// Bytes with a head, and a hash over all of it at the end.
pub(crate) fn envelope(raw: &[u8], name: &str, key: Option<&Key>) -> StoreResult<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(if key.is_some() { ENCRYPTED } else { 0 }).to_le_bytes());
    bytes.extend_from_slice(&(raw.len() as u64).to_le_bytes());
    bytes.extend(seal::pack(raw, key, name, HEAD_BYTES as u64)?);
    let digest = blake3::hash(&bytes);
    bytes.extend_from_slice(digest.as_bytes());
    Ok(bytes)
}

/// What [`envelope`] was given.
pub(crate) fn open_envelope(bytes: &[u8], name: &str, key: Option<&Key>) -> StoreResult<Vec<u8>> {
    let damaged = |offset: usize, why: &str| StoreError::damaged(name, offset as u64, why);
    if bytes.len() < HEAD_BYTES + DIGEST_BYTES {
        return Err(damaged(bytes.len(), "it is cut off"));
    }
    if bytes[..4] != MAGIC {
        return Err(damaged(0, "it is none of ours"));
    }
    let (body, digest) = bytes.split_at(bytes.len() - DIGEST_BYTES);
    if blake3::hash(body).as_bytes() != digest {
        return Err(damaged(0, "some of its bytes have changed, or its end is missing"));
    }
    let version = u16::from_le_bytes([body[4], body[5]]);
    let flags = u16::from_le_bytes([body[6], body[7]]);
    if version != VERSION || flags & !ENCRYPTED != 0 {
        let why = format!("it has version {version}, flags {flags:#x}: a newer hotspare wrote it");
        return Err(damaged(4, &why));
    }
    let mut raw_bytes = [0; 8];
    raw_bytes.copy_from_slice(&body[8..HEAD_BYTES]);
    let raw_bytes = u64::from_le_bytes(raw_bytes);
    if raw_bytes > MANIFEST_BYTES_MAX {
        return Err(damaged(8, "it claims to be larger than any"));
    }
    let at = (name, HEAD_BYTES as u64);
    let encrypted = flags & ENCRYPTED != 0;
    seal::unpack(body[HEAD_BYTES..].to_vec(), key, encrypted, at, raw_bytes as usize)
}

/// Whether the object is encrypted, as its head says.
pub(crate) fn is_encrypted(bytes: &[u8]) -> bool {
    bytes.get(6).is_some_and(|flags| u16::from(*flags) & ENCRYPTED != 0)
}
