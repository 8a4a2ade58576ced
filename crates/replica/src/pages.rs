//! How page contents travel: zero pages as nothing, others raw, as LZ4, as LZ4 of the difference
//! from what the spare already has, as those lines of them that have changed, or by the number of a
//! page that the spare has kept. Pure functions of bytes; layout: `docs/formats/stream.md`.

use std::ops::Range;

use hotspare_image::memory::{MmId, PageOwner, SharedId};
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};
use xxhash_rust::xxh3::xxh3_64;

use crate::bases::{Bases, PAGE, PageName};
use crate::frame::{FrameError, Kind};
use crate::kept::{Keeper, KeptPages};
use crate::lines::{LINE, LineSums, put_lines, stretches};

/// Most pages with a descriptor in one frame: even as runs of one page each, raw, they fit.
pub const PAGES_PER_FRAME_MAX: usize = 252;
/// Most runs in one frame.
pub const RUNS_PER_FRAME_MAX: usize = 4096;
/// Below this share of a page, compressed bytes are worth their while.
const WORTH_BYTES: usize = PAGE * 7 / 10;
/// After pages that did not compress, 0, 1, 3, 7, then always 15 are not tried.
const SKIPS_MAX: u32 = 15;

const OWNER_MM: u8 = 0;
const OWNER_SHARED: u8 = 1;
const RUN_DESCRIBED: u32 = 0;
const RUN_ZERO: u32 = 1;
const RUN_DISCARD: u32 = 2;

/// How one page is encoded; the upper three bits of its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 4,096 bytes as they are.
    Raw,
    /// No bytes: all zero.
    Zero,
    /// An LZ4 block.
    Lz4,
    /// XXH3-64's low half of the page, then an LZ4 block of the XOR with its base.
    XorLz4,
    /// Which lines have changed, a bit each, and their bytes; the others are as they were.
    Lines,
    /// The number of a page that the spare has kept ([`crate::kept`]).
    Kept,
}

impl Encoding {
    /// All of them.
    pub const ALL: [Encoding; 6] = [
        Encoding::Raw,
        Encoding::Zero,
        Encoding::Lz4,
        Encoding::XorLz4,
        Encoding::Lines,
        Encoding::Kept,
    ];

    /// The number on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Encoding::Raw => 0,
            Encoding::Zero => 1,
            Encoding::Lz4 => 2,
            Encoding::XorLz4 => 3,
            Encoding::Lines => 4,
            Encoding::Kept => 5,
        }
    }

    fn from_number(number: u16) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| encoding.number() == number)
    }
}

/// What a run says of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunKind {
    /// Each has a descriptor and a body.
    Described,
    Zero,
    Discard,
}

impl RunKind {
    pub(crate) const fn number(self) -> u32 {
        match self {
            RunKind::Described => RUN_DESCRIBED,
            RunKind::Zero => RUN_ZERO,
            RunKind::Discard => RUN_DISCARD,
        }
    }

    pub(crate) fn from_number(number: u32) -> Option<RunKind> {
        [RunKind::Described, RunKind::Zero, RunKind::Discard]
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}

/// Consecutive pages: the address (or offset) of the first and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// Address of the first page, page aligned.
    pub first: u64,
    /// Number of pages, at least one.
    pub pages: u32,
}

/// How hard to try before sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Zero pages are recognised, and lines that have not changed.
    Plain,
    /// LZ4 and XOR; both ends remember the pages.
    Squeeze,
}

/// What came of encoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeCounts {
    /// Pages sent as they are.
    pub raw: u64,
    /// Zero pages.
    pub zero: u64,
    /// LZ4 pages.
    pub lz4: u64,
    /// XOR pages.
    pub xor: u64,
    /// Pages of which the changed lines were sent.
    pub lines: u64,
    /// Pages that the spare had kept.
    pub kept: u64,
}

impl EncodeCounts {
    /// All pages.
    #[must_use]
    pub fn pages(self) -> u64 {
        self.raw + self.zero + self.lz4 + self.xor + self.lines + self.kept
    }
}

/// Encodes pages of one stream, in order.
pub struct PageEncoder {
    /// What the spare has of the ghost it had before.
    pub kept: KeptPages,
    bases: Bases,
    sums: LineSums,
    table: CompressTable,
    compressed: Vec<u8>,
    difference: Vec<u8>,
}

impl Default for PageEncoder {
    fn default() -> Self {
        PageEncoder {
            kept: KeptPages::default(),
            bases: Bases::default(),
            sums: LineSums::default(),
            table: CompressTable::small(),
            // Zeroed once; LZ4 writes over it page after page.
            compressed: vec![0; lz4_flex::block::get_maximum_output_size(PAGE)],
            difference: vec![0; PAGE],
        }
    }
}

impl PageEncoder {
    /// Appends the payload of one Pages frame, compressed: `pages` are those of `runs` one after
    /// another. The frame must carry [`crate::frame::FLAG_REMEMBER`].
    ///
    /// # Panics
    /// If there are more than [`PAGES_PER_FRAME_MAX`] pages or `pages` does not match `runs`.
    pub fn squeeze(
        &mut self,
        owner: PageOwner,
        runs: &[PageRun],
        pages: &[&[u8]],
        payload: &mut Vec<u8>,
    ) -> EncodeCounts {
        let table = put_described(owner, runs, pages, payload);
        let mut counts = EncodeCounts::default();
        let mut addresses = addresses(runs);
        let mut trial = Trial::default();
        for (number, page) in pages.iter().enumerate() {
            let name = (owner, addresses.next().unwrap_or_default());
            let before = payload.len();
            let encoding = if is_zero(page) {
                self.sums.forget(owner, name.1, 1);
                Encoding::Zero
            } else {
                self.squeeze_page(name, page, &mut trial, payload)
            };
            counts.add(encoding);
            let length = payload.len() - before;
            put_descriptor(payload, table, number, encoding, length);
        }
        counts
    }

    fn squeeze_page(
        &mut self,
        name: PageName,
        page: &[u8],
        trial: &mut Trial,
        payload: &mut Vec<u8>,
    ) -> Encoding {
        let changed = self.sums.changed(name, page);
        if let Some(base) = self.bases.get(name) {
            xor_into(&mut self.difference, page, base);
            let length = compress(&self.difference, &mut self.compressed, &mut self.table);
            if length < WORTH_BYTES {
                payload.extend_from_slice(&check(page));
                payload.extend_from_slice(&self.compressed[..length]);
                self.remember(name, page);
                return Encoding::XorLz4;
            }
        } else if let Some(changed) = changed {
            // The spare has the page, but it is at hand in the ghost only: nobody remembers it.
            put_lines(changed, page, payload);
            return Encoding::Lines;
        }
        if let Some(number) = self.kept.find(page) {
            payload.extend_from_slice(&number.to_le_bytes());
            return Encoding::Kept;
        }
        self.remember(name, page);
        if trial.is_due() {
            let length = compress(page, &mut self.compressed, &mut self.table);
            trial.learn(length < WORTH_BYTES);
            if length < WORTH_BYTES {
                payload.extend_from_slice(&self.compressed[..length]);
                return Encoding::Lz4;
            }
        }
        payload.extend_from_slice(page);
        Encoding::Raw
    }

    fn remember(&mut self, name: PageName, page: &[u8]) {
        self.bases.note(name).0.copy_from_slice(page);
    }

    /// Appends the head of a Pages frame to `payload`. The bodies that follow it are told in their
    /// order: pages as they are, or what else is told of one or several pages, which goes to
    /// `beside`.
    ///
    /// # Panics
    /// As [`PageEncoder::squeeze`].
    pub fn plain(
        &mut self,
        owner: PageOwner,
        runs: &[PageRun],
        pages: &[&[u8]],
        payload: &mut Vec<u8>,
        beside: &mut Vec<u8>,
    ) -> (EncodeCounts, Vec<Body>) {
        let table = put_described(owner, runs, pages, payload);
        let mut counts = EncodeCounts::default();
        let mut bodies = Vec::with_capacity(pages.len());
        for (number, (page, address)) in pages.iter().zip(addresses(runs)).enumerate() {
            let before = beside.len();
            let encoding = self.tell_beside((owner, address), page, beside);
            let length = match encoding {
                Encoding::Raw => PAGE,
                _ => beside.len() - before,
            };
            match (encoding, bodies.last_mut()) {
                (Encoding::Zero, _) => {}
                (Encoding::Raw, _) => bodies.push(Body::Page(number)),
                (_, Some(Body::Beside(last))) => last.end = beside.len(),
                _ => bodies.push(Body::Beside(before..beside.len())),
            }
            counts.add(encoding);
            put_descriptor(payload, table, number, encoding, length);
        }
        (counts, bodies)
    }

    /// What is told of a page that is not compressed, and how; raw if it is to follow.
    fn tell_beside(&mut self, name: PageName, page: &[u8], beside: &mut Vec<u8>) -> Encoding {
        if is_zero(page) {
            self.sums.forget(name.0, name.1, 1);
            return Encoding::Zero;
        }
        if let Some(changed) = self.sums.changed(name, page) {
            put_lines(changed, page, beside);
            return Encoding::Lines;
        }
        match self.kept.find(page) {
            Some(number) => {
                beside.extend_from_slice(&number.to_le_bytes());
                Encoding::Kept
            }
            None => Encoding::Raw,
        }
    }

    /// These pages have been discarded, or are zero: what is sent of them next is sent whole.
    pub fn discarded(&mut self, owner: PageOwner, runs: &[PageRun]) {
        for run in runs {
            self.sums.forget(owner, run.first, run.pages.into());
        }
    }

    /// The spare begins with nothing, or has dropped what it got: pages are sent whole.
    pub fn begin_anew(&mut self) {
        self.sums.clear();
    }
}

/// What follows the head of a Pages frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// A page as it is, by its number in the frame.
    Page(usize),
    /// A part of what was told beside: changed lines, numbers.
    Beside(Range<usize>),
}

/// Appends everything before the bodies of described pages; where their descriptors are.
fn put_described(
    owner: PageOwner,
    runs: &[PageRun],
    pages: &[&[u8]],
    payload: &mut Vec<u8>,
) -> usize {
    let count: usize = runs.iter().map(|run| run.pages as usize).sum();
    let whole = pages.iter().all(|page| page.len() == PAGE);
    assert!(count <= PAGES_PER_FRAME_MAX && count == pages.len() && whole, "{count} pages");
    put_head(owner, runs, RunKind::Described, payload);
    let table = payload.len();
    payload.resize(table + count * 2, 0);
    table
}

fn put_descriptor(
    payload: &mut [u8],
    table: usize,
    number: usize,
    encoding: Encoding,
    length: usize,
) {
    let descriptor = encoding.number() << 13 | length as u16;
    let at = table + number * 2;
    payload[at..at + 2].copy_from_slice(&descriptor.to_le_bytes());
}

/// Whether the next page is worth a try, from how the last ones went.
#[derive(Default)]
struct Trial {
    failures: u32,
    skip: u32,
}

impl Trial {
    fn is_due(&mut self) -> bool {
        self.skip = self.skip.saturating_sub(1);
        self.skip == 0
    }

    fn learn(&mut self, paid: bool) {
        self.failures = if paid { 0 } else { self.failures.min(4) + 1 };
        // The count includes the page that is due.
        self.skip = if paid { 0 } else { ((1 << self.failures) / 2).min(SKIPS_MAX + 1) };
    }
}

impl EncodeCounts {
    pub(crate) fn add_all(&mut self, more: EncodeCounts) {
        self.raw += more.raw;
        self.zero += more.zero;
        self.lz4 += more.lz4;
        self.xor += more.xor;
        self.lines += more.lines;
        self.kept += more.kept;
    }

    fn add(&mut self, encoding: Encoding) {
        match encoding {
            Encoding::Raw => self.raw += 1,
            Encoding::Zero => self.zero += 1,
            Encoding::Lz4 => self.lz4 += 1,
            Encoding::XorLz4 => self.xor += 1,
            Encoding::Lines => self.lines += 1,
            Encoding::Kept => self.kept += 1,
        }
    }
}

/// Appends the payload of a Pages frame that says of whole runs that they are zero.
///
/// # Panics
/// If there are more than [`RUNS_PER_FRAME_MAX`] runs.
pub fn encode_zero_runs(owner: PageOwner, runs: &[PageRun], payload: &mut Vec<u8>) {
    assert!(runs.len() <= RUNS_PER_FRAME_MAX, "{} runs", runs.len());
    put_head(owner, runs, RunKind::Zero, payload);
}

/// Appends the payload of a Pages frame that says of whole runs that they are discarded, see
/// [`Content::Discard`].
///
/// # Panics
/// If there are more than [`RUNS_PER_FRAME_MAX`] runs.
pub fn encode_discard_runs(owner: PageOwner, runs: &[PageRun], payload: &mut Vec<u8>) {
    assert!(runs.len() <= RUNS_PER_FRAME_MAX, "{} runs", runs.len());
    put_head(owner, runs, RunKind::Discard, payload);
}

fn put_head(owner: PageOwner, runs: &[PageRun], run_kind: RunKind, payload: &mut Vec<u8>) {
    let (kind, id) = match owner {
        PageOwner::Mm(MmId(id)) => (OWNER_MM, u64::from(id)),
        PageOwner::Shared(SharedId(id)) => (OWNER_SHARED, id),
    };
    payload.extend_from_slice(&[kind, 0, 0, 0]);
    payload.extend_from_slice(&(runs.len() as u32).to_le_bytes());
    payload.extend_from_slice(&id.to_le_bytes());
    for run in runs {
        payload.extend_from_slice(&run.first.to_le_bytes());
        payload.extend_from_slice(&run.pages.to_le_bytes());
        payload.extend_from_slice(&run_kind.number().to_le_bytes());
    }
}

fn addresses(runs: &[PageRun]) -> impl Iterator<Item = u64> + '_ {
    runs.iter().flat_map(|run| {
        (0..u64::from(run.pages)).map(move |page| run.first.wrapping_add(page * PAGE as u64))
    })
}

/// Whether all bytes are zero; looks at 64 bytes at a time and stops at the first that are not.
#[must_use]
pub fn is_zero(page: &[u8]) -> bool {
    let (blocks, rest) = page.as_chunks::<64>();
    blocks.iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

fn xor_into(into: &mut [u8], page: &[u8], base: &[u8]) {
    for ((into, page), base) in into.iter_mut().zip(page).zip(base) {
        *into = page ^ base;
    }
}

fn compress(input: &[u8], output: &mut [u8], table: &mut CompressTable) -> usize {
    match compress_into_with_table(input, output, table) {
        Ok(length) => length,
        Err(never) => unreachable!("the output buffer holds the worst case: {never}"),
    }
}

fn check(page: &[u8]) -> [u8; 4] {
    (xxh3_64(page) as u32).to_le_bytes()
}

/// What a decoded run holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// This many zero pages.
    Zero(u32),
    /// This many pages have nothing of their own any more (`MADV_DONTNEED`, or mapped anew): back
    /// to zero, or to the file's content in a private file mapping.
    Discard(u32),
    /// Pages one after another, or a part of a page.
    Bytes(&'a [u8]),
}

/// Decodes pages of one stream, in order.
pub struct PageDecoder {
    /// Has the pages that this spare has told as kept.
    pub kept: Option<Box<dyn Keeper>>,
    bases: Bases,
    page: Vec<u8>,
}

impl Default for PageDecoder {
    fn default() -> Self {
        PageDecoder { kept: None, bases: Bases::default(), page: vec![0; PAGE] }
    }
}

impl PageDecoder {
    /// Decodes the payload of one Pages frame and hands each piece to `sink` with its owner and
    /// address. Fails on any byte that does not fit; what `sink` has seen by then is void.
    pub fn decode(
        &mut self,
        payload: &[u8],
        remember: bool,
        mut sink: impl FnMut(PageOwner, u64, Content<'_>) -> Result<(), FrameError>,
    ) -> Result<(), FrameError> {
        let mut bytes = Bytes(payload);
        let (owner, run_count) = read_head(&mut bytes)?;
        let mut runs = Bytes(bytes.take(run_count * 16)?);
        let described = described_pages(Bytes(runs.0))?;
        let mut table = Bytes(bytes.take(described * 2)?);
        for _ in 0..run_count {
            let (run, kind) = read_run(&mut runs)?;
            let whole = match kind {
                RunKind::Described => None,
                RunKind::Zero => Some(Content::Zero(run.pages)),
                RunKind::Discard => Some(Content::Discard(run.pages)),
            };
            if let Some(content) = whole {
                // Bases stay: they are what was last sent, whatever became of it.
                sink(owner, run.first, content)?;
                continue;
            }
            for page in 0..u64::from(run.pages) {
                let descriptor = table.u16()?;
                let address = run.first + page * PAGE as u64;
                let name = (owner, address);
                let Self { bases, kept, page } = &mut *self;
                match decode_page(bases, kept, page, &mut bytes, name, descriptor)? {
                    Decoded::Zero => sink(owner, address, Content::Zero(1))?,
                    Decoded::Whole(page) => {
                        sink(owner, address, Content::Bytes(page))?;
                        if remember {
                            bases.note(name).0.copy_from_slice(page);
                        }
                    }
                    Decoded::Kept(page) => sink(owner, address, Content::Bytes(page))?,
                    Decoded::Lines(changed, mut lines) => {
                        for stretch in stretches(changed) {
                            let part = lines.take(stretch.len())?;
                            sink(owner, address + stretch.start as u64, Content::Bytes(part))?;
                        }
                    }
                }
            }
        }
        if bytes.0.is_empty() { Ok(()) } else { Err(malformed("bytes after the last page")) }
    }
}

/// What was sent of a page.
enum Decoded<'a> {
    Zero,
    Whole(&'a [u8]),
    Kept(&'a [u8]),
    Lines(u32, Bytes<'a>),
}

/// One page; its bytes are in the payload or in `scratch`.
fn decode_page<'a, 'payload: 'a>(
    bases: &Bases,
    kept: &mut Option<Box<dyn Keeper>>,
    scratch: &'a mut [u8],
    bytes: &mut Bytes<'payload>,
    name: PageName,
    descriptor: u16,
) -> Result<Decoded<'a>, FrameError> {
    let encoding = Encoding::from_number(descriptor >> 13).ok_or(malformed("encoding"))?;
    let body = bytes.take(usize::from(descriptor & 0x1fff))?;
    match encoding {
        Encoding::Zero if body.is_empty() => return Ok(Decoded::Zero),
        Encoding::Zero => return Err(malformed("a zero page with bytes")),
        Encoding::Raw if body.len() == PAGE => return Ok(Decoded::Whole(body)),
        Encoding::Raw => return Err(malformed("a raw page of another length")),
        Encoding::Lines => {
            let mut lines = Bytes(body);
            let changed = lines.u32()?;
            if lines.0.len() != changed.count_ones() as usize * LINE {
                return Err(malformed("another number of lines"));
            }
            return Ok(Decoded::Lines(changed, lines));
        }
        Encoding::Kept => {
            let number = body.try_into().map_err(|_| malformed("number of a kept page"))?;
            let kept = kept.as_mut().ok_or(malformed("nothing was told as kept"))?;
            kept.page(u32::from_le_bytes(number), scratch).map_err(FrameError::Kept)?;
            return Ok(Decoded::Kept(scratch));
        }
        Encoding::Lz4 => decompress_page(body, scratch)?,
        Encoding::XorLz4 => {
            let (expected, body) = body.split_at_checked(4).ok_or(malformed("short XOR page"))?;
            decompress_page(body, scratch)?;
            let base = bases.get(name).ok_or(malformed("XOR with a page never sent"))?;
            for (byte, base) in scratch.iter_mut().zip(base) {
                *byte ^= base;
            }
            if check(scratch) != expected {
                return Err(malformed("XOR page does not match its check"));
            }
        }
    }
    Ok(Decoded::Whole(scratch))
}

fn decompress_page(body: &[u8], page: &mut [u8]) -> Result<(), FrameError> {
    match decompress_into(body, page) {
        Ok(PAGE) => Ok(()),
        Ok(_) => Err(malformed("an LZ4 page of another length")),
        Err(_) => Err(malformed("an LZ4 page that does not decompress")),
    }
}

fn read_head(bytes: &mut Bytes<'_>) -> Result<(PageOwner, usize), FrameError> {
    let head = bytes.take(4)?;
    let runs = bytes.u32()? as usize;
    let id = bytes.u64()?;
    let owner = match head {
        [OWNER_MM, 0, 0, 0] => {
            PageOwner::Mm(MmId(u32::try_from(id).map_err(|_| malformed("address space id"))?))
        }
        [OWNER_SHARED, 0, 0, 0] => PageOwner::Shared(SharedId(id)),
        _ => return Err(malformed("page owner")),
    };
    if runs > RUNS_PER_FRAME_MAX {
        return Err(malformed("too many runs"));
    }
    Ok((owner, runs))
}

fn read_run(bytes: &mut Bytes<'_>) -> Result<(PageRun, RunKind), FrameError> {
    let run = PageRun { first: bytes.u64()?, pages: bytes.u32()? };
    let kind = RunKind::from_number(bytes.u32()?).ok_or(malformed("kind of run"))?;
    let end = run.first.checked_add(u64::from(run.pages) * PAGE as u64);
    if run.pages == 0 || !run.first.is_multiple_of(PAGE as u64) || end.is_none() {
        return Err(malformed("run of pages"));
    }
    Ok((run, kind))
}

fn described_pages(mut runs: Bytes<'_>) -> Result<usize, FrameError> {
    let mut pages = 0usize;
    while !runs.0.is_empty() {
        let (run, kind) = read_run(&mut runs)?;
        pages = pages.saturating_add(match kind {
            RunKind::Described => run.pages as usize,
            RunKind::Zero | RunKind::Discard => 0,
        });
    }
    if pages > PAGES_PER_FRAME_MAX { Err(malformed("too many pages")) } else { Ok(pages) }
}

fn malformed(why: &str) -> FrameError {
    FrameError::Malformed { kind: Kind::Pages, why: why.into() }
}

/// What is left to read.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], FrameError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(malformed("it is too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        self.take(N)?.try_into().map_err(|_| malformed("it is too short"))
    }

    fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: PageOwner = PageOwner::Mm(MmId(7));

    fn decoded(decoder: &mut PageDecoder, payload: &[u8], remember: bool) -> Vec<(u64, Vec<u8>)> {
        let mut pages = Vec::new();
        decoder
            .decode(payload, remember, |owner, address, content| {
                assert_eq!(owner, OWNER);
                match content {
                    Content::Zero(count) => pages.push((address, vec![0; count as usize * PAGE])),
                    Content::Bytes(bytes) => pages.push((address, bytes.to_vec())),
                    Content::Discard(_) => panic!("nobody discarded {address:#x}"),
                }
                Ok(())
            })
            .unwrap();
        pages
    }

    fn cut(bytes: &[u8]) -> Vec<&[u8]> {
        bytes.chunks_exact(PAGE).collect()
    }

    fn noise(seed: u64) -> Vec<u8> {
        (0..PAGE as u64 / 8)
            .flat_map(|i| xxh3_64(&(seed + i).to_le_bytes()).to_le_bytes())
            .collect()
    }

    #[test]
    fn pages_of_every_encoding_come_back_as_they_were() {
        let (mut encoder, mut decoder) = (PageEncoder::default(), PageDecoder::default());
        let mut touched = noise(1);
        let text = b"key:000001 value ".repeat(300)[..PAGE].to_vec();
        for (round, expected) in [(0, (1, 1, 1, 0)), (1, (0, 1, 0, 2))] {
            touched[17] = round;
            let bytes = [touched.clone(), vec![0; PAGE], text.clone()].concat();
            let runs = [PageRun { first: 0x1000, pages: 2 }, PageRun { first: 0x9000, pages: 1 }];
            let mut payload = Vec::new();
            let counts = encoder.squeeze(OWNER, &runs, &cut(&bytes), &mut payload);
            assert_eq!((counts.raw, counts.zero, counts.lz4, counts.xor), expected);
            let pages = decoded(&mut decoder, &payload, true);
            let addresses: Vec<u64> = pages.iter().map(|page| page.0).collect();
            assert_eq!(addresses, [0x1000, 0x2000, 0x9000]);
            let back: Vec<u8> = pages.into_iter().flat_map(|page| page.1).collect();
            assert!(back == bytes);
        }
    }

    #[test]
    fn zero_runs_cost_sixteen_bytes_whatever_their_length() {
        let mut payload = Vec::new();
        let run = PageRun { first: 0x10_0000, pages: 1 << 20 };
        encode_zero_runs(OWNER, &[run], &mut payload);
        assert_eq!(payload.len(), 32);
        let mut seen = Vec::new();
        let mut decoder = PageDecoder::default();
        let sink = |_: PageOwner, address: u64, content: Content<'_>| {
            seen.push((address, content == Content::Zero(1 << 20)));
            Ok(())
        };
        decoder.decode(&payload, false, sink).unwrap();
        assert_eq!(seen, [(0x10_0000, true)]);
    }

    #[test]
    fn a_discard_is_not_taken_for_zero_pages() {
        let run = PageRun { first: 0x10_0000, pages: 1 << 20 };
        let mut payload = Vec::new();
        encode_discard_runs(OWNER, &[run], &mut payload);
        assert_eq!(payload.len(), 32);
        let mut seen = 0;
        let sink = |owner: PageOwner, address: u64, content: Content<'_>| {
            assert_eq!((owner, address, content), (OWNER, run.first, Content::Discard(1 << 20)));
            seen += 1;
            Ok(())
        };
        PageDecoder::default().decode(&payload, false, sink).unwrap();
        assert_eq!(seen, 1);
    }

    fn plainly(
        encoder: &mut PageEncoder,
        runs: &[PageRun],
        pages: &[&[u8]],
    ) -> (EncodeCounts, Vec<u8>) {
        let (mut payload, mut lines) = (Vec::new(), Vec::new());
        let (counts, bodies) = encoder.plain(OWNER, runs, pages, &mut payload, &mut lines);
        for body in bodies {
            payload.extend_from_slice(match body {
                Body::Page(number) => pages[number],
                Body::Beside(range) => &lines[range],
            });
        }
        (counts, payload)
    }

    /// A page that a program changes a little, or altogether, or gives back, is on the spare what
    /// it was when it was sent, in whichever way it is sent.
    #[test]
    fn the_lines_that_travel_are_enough() {
        const PAGES: u64 = 5;
        let (mut encoder, mut decoder) = (PageEncoder::default(), PageDecoder::default());
        let run = [PageRun { first: 0x1000, pages: PAGES as u32 }];
        let mut guest = vec![0u8; PAGES as usize * PAGE];
        let mut spare = guest.clone();
        let mut total = EncodeCounts::default();
        let mut dice = 7u64;
        let mut roll = |below: usize| {
            dice = xxh3_64(&dice.to_le_bytes());
            dice as usize % below
        };
        for round in 0..500u64 {
            for _ in 0..roll(20) {
                let at = roll(guest.len());
                guest[at] = roll(256) as u8;
            }
            let at = roll(PAGES as usize) * PAGE;
            match roll(10) {
                0 => guest[at..at + PAGE].copy_from_slice(&noise(round)),
                1 => guest[at..at + PAGE].fill(0),
                2 => {
                    // Discarded, and written again before it is sent.
                    let gone = [PageRun { first: 0x1000 + at as u64, pages: 1 }];
                    encoder.discarded(OWNER, &gone);
                    guest[at..at + PAGE].fill(0);
                    spare[at..at + PAGE].fill(0);
                    guest[at + roll(PAGE)] = 1;
                }
                3 if roll(9) == 0 => {
                    encoder.begin_anew();
                    spare.fill(0xee);
                }
                _ => {}
            }
            let squeezes = roll(3) == 0;
            let (counts, payload) = if squeezes {
                let mut payload = Vec::new();
                (encoder.squeeze(OWNER, &run, &cut(&guest), &mut payload), payload)
            } else {
                plainly(&mut encoder, &run, &cut(&guest))
            };
            total.add_all(counts);
            let apply = |_: PageOwner, address: u64, content: Content<'_>| {
                let at = (address - 0x1000) as usize;
                match content {
                    Content::Zero(pages) => spare[at..at + pages as usize * PAGE].fill(0),
                    Content::Bytes(bytes) => spare[at..at + bytes.len()].copy_from_slice(bytes),
                    Content::Discard(_) => panic!("nobody sent a discard"),
                }
                Ok(())
            };
            decoder.decode(&payload, squeezes, apply).unwrap();
            assert!(spare == guest, "round {round}: {counts:?}");
        }
        let EncodeCounts { raw, zero, lz4, xor, lines, .. } = total;
        assert!([raw, zero, lz4, xor, lines].iter().all(|count| *count > 10), "{total:?}");
    }

    struct Two(Vec<u8>, Vec<u8>);

    impl Keeper for Two {
        fn page(&mut self, number: u32, page: &mut [u8]) -> std::io::Result<()> {
            let kept = [&self.0, &self.1].into_iter().nth(number as usize);
            page.copy_from_slice(kept.ok_or(std::io::ErrorKind::NotFound)?);
            Ok(())
        }
    }

    #[test]
    fn a_page_that_the_spare_has_kept_travels_as_a_number() {
        let (one, two, new) = (noise(1), noise(2), noise(3));
        let key = [9; 32];
        let digests = [&one, &two].map(|page| crate::kept::digest(&key, page));
        let bytes = [two.clone(), new, one.clone(), one.clone()].concat();
        let runs = [PageRun { first: 0x1000, pages: 3 }, PageRun { first: 0x9000, pages: 1 }];
        for squeezes in [false, true] {
            let (mut encoder, mut decoder) = (PageEncoder::default(), PageDecoder::default());
            encoder.kept.learn(key, &digests);
            decoder.kept = Some(Box::new(Two(one.clone(), two.clone())));
            let (counts, payload) = if squeezes {
                let mut payload = Vec::new();
                (encoder.squeeze(OWNER, &runs, &cut(&bytes), &mut payload), payload)
            } else {
                plainly(&mut encoder, &runs, &cut(&bytes))
            };
            assert_eq!((counts.kept, counts.raw), (3, 1));
            assert_eq!(payload.len(), 16 + 2 * 16 + 4 * 2 + 3 * 4 + PAGE);
            let back = decoded(&mut decoder, &payload, squeezes);
            assert!(back.into_iter().flat_map(|page| page.1).eq(bytes.iter().copied()));
            // What was sent by its number counts as sent: a change of it is a few lines.
            let mut changed = bytes[..PAGE].to_vec();
            changed[5] ^= 1;
            let run = [PageRun { first: 0x1000, pages: 1 }];
            let (counts, _) = plainly(&mut encoder, &run, &[&changed]);
            assert_eq!(counts.lines, 1);
            // A ghost that is another one by now has kept nothing.
            encoder.kept.end();
            let run = [PageRun { first: 0x7000, pages: 1 }];
            assert_eq!(plainly(&mut encoder, &run, &[&one]).0.raw, 1);
        }
    }

    #[test]
    fn a_number_that_was_never_told_is_refused() {
        let key = [9; 32];
        let mut encoder = PageEncoder::default();
        let page = noise(1);
        encoder.kept.learn(key, &[[0; 16], [1; 16], crate::kept::digest(&key, &page)]);
        let run = [PageRun { first: 0x1000, pages: 1 }];
        let (counts, payload) = plainly(&mut encoder, &run, &[&page]);
        assert_eq!(counts.kept, 1);
        let mut decoder = PageDecoder::default();
        let error = decoder.decode(&payload, false, |_, _, _| Ok(())).unwrap_err();
        assert!(error.to_string().contains("nothing was told"), "{error}");
        decoder.kept = Some(Box::new(Two(noise(1), noise(2))));
        let error = decoder.decode(&payload, false, |_, _, _| Ok(())).unwrap_err();
        assert!(matches!(error, FrameError::Kept(_)), "{error}");
    }

    #[test]
    fn lines_that_are_not_whole_are_refused() {
        let mut encoder = PageEncoder::default();
        let run = [PageRun { first: 0x1000, pages: 1 }];
        let mut page = noise(3);
        plainly(&mut encoder, &run, &[&page]);
        page[0] ^= 1;
        let (counts, mut payload) = plainly(&mut encoder, &run, &[&page]);
        assert_eq!((counts.lines, payload.len()), (1, 34 + 4 + LINE));
        // Another line is named than there are bytes for.
        payload[34] |= 2;
        let error = PageDecoder::default().decode(&payload, false, |_, _, _| Ok(())).unwrap_err();
        assert!(error.to_string().contains("number of lines"), "{error}");
    }

    #[test]
    fn plain_pages_follow_their_head() {
        let bytes = [noise(1), vec![0; PAGE], noise(2)].concat();
        let runs = [PageRun { first: 0x1000, pages: 2 }, PageRun { first: 0x9000, pages: 1 }];
        let (counts, payload) = plainly(&mut PageEncoder::default(), &runs, &cut(&bytes));
        assert_eq!((counts.raw, counts.zero, counts.lines), (2, 1, 0));
        let back = decoded(&mut PageDecoder::default(), &payload, false);
        let addresses: Vec<u64> = back.iter().map(|page| page.0).collect();
        assert_eq!(addresses, [0x1000, 0x2000, 0x9000]);
        assert!(back.into_iter().flat_map(|page| page.1).eq(bytes));
    }

    #[test]
    fn a_page_sent_again_after_a_discard_comes_back_as_it_is() {
        let (mut encoder, mut decoder) = (PageEncoder::default(), PageDecoder::default());
        let run = [PageRun { first: 0x1000, pages: 1 }];
        let mut page = noise(5);
        for round in 0..3 {
            page[9] = round;
            let mut payload = Vec::new();
            let counts = encoder.squeeze(OWNER, &run, &[&page], &mut payload);
            assert_eq!(counts.xor, u64::from(round > 0));
            let pages = decoded(&mut decoder, &payload, true);
            assert!(pages == [(0x1000, page.clone())]);
            payload.clear();
            encode_discard_runs(OWNER, &run, &mut payload);
            decoder.decode(&payload, false, |_, _, _| Ok(())).unwrap();
        }
    }

    #[test]
    fn a_run_of_an_unknown_kind_is_refused() {
        let mut payload = Vec::new();
        encode_discard_runs(OWNER, &[PageRun { first: 0x1000, pages: 1 }], &mut payload);
        payload[28] = 3;
        let error = PageDecoder::default().decode(&payload, false, |_, _, _| Ok(())).unwrap_err();
        assert!(error.to_string().contains("kind of run"), "{error}");
    }

    #[test]
    fn a_full_frame_of_scattered_raw_pages_fits() {
        let runs: Vec<PageRun> = (0..PAGES_PER_FRAME_MAX as u64)
            .map(|page| PageRun { first: page * 3 * PAGE as u64, pages: 1 })
            .collect();
        let bytes: Vec<u8> = (0..PAGES_PER_FRAME_MAX as u64).flat_map(noise).collect();
        let (counts, payload) = plainly(&mut PageEncoder::default(), &runs, &cut(&bytes));
        assert_eq!(counts.raw as usize, PAGES_PER_FRAME_MAX);
        assert!(payload.len() <= crate::frame::PAYLOAD_BYTES_MAX);
    }

    #[test]
    fn a_difference_from_a_page_never_sent_is_refused() {
        let (page, mut payload) = (noise(3), Vec::new());
        let run = [PageRun { first: 0x1000, pages: 1 }];
        let mut encoder = PageEncoder::default();
        encoder.squeeze(OWNER, &run, &[&page], &mut payload);
        payload.clear();
        encoder.squeeze(OWNER, &run, &[&page], &mut payload);
        let error = PageDecoder::default().decode(&payload, true, |_, _, _| Ok(())).unwrap_err();
        assert!(error.to_string().contains("never sent"), "{error}");
    }

    #[test]
    fn a_zero_page_is_recognised_by_every_byte() {
        let mut page = vec![0; PAGE];
        assert!(is_zero(&page));
        for at in [0, 63, 64, 2047, PAGE - 1] {
            page[at] = 1;
            assert!(!is_zero(&page));
            page[at] = 0;
        }
    }
}
