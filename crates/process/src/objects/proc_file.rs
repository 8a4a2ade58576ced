//! Files of /proc and /sys: made by the kernel at each read, so opening them again is enough. The
//! guest has its own /proc, with its own numbers.
//!
//! A listing of mappings that has been read in part goes on at the same mapping, whatever its
//! offset: our stub is in it where the guest is captured, and neighbours that were apart may be one
//! mapping in the ghost. The kernel itself goes on by address (`m_start` of fs/proc/task_mmu.c),
//! so nothing that changes the listing later does harm.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::OwnedFd;

use hotspare_image::objects::{ListingPosition, ProcFile};
use hotspare_image::tree::HostPath;
use hotspare_kernel::KernelError;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::restore::{RestoreContext, seek};

/// The image: path and offset. `duplicate` is the guest's open file description.
pub fn capture(
    known: &Known,
    offset: u64,
    duplicate: impl FnOnce() -> ObjectResult<OwnedFd>,
) -> ObjectResult<ProcFile> {
    if known.deleted {
        let reason = "the process it told of has ended";
        return Err(ObjectError::transient(&known.path, reason));
    }
    let listing = match offset > 0 && is_listing(&known.path) {
        true => Some(place(File::from(duplicate()?), offset)?),
        false => None,
    };
    Ok(ProcFile { path: HostPath(known.path.clone()), offset, listing })
}

/// Where a listing goes on. Only what comes next tells: the offset is right for the listing as it
/// was when it was read. It is set to what leads there now.
fn place(mut file: File, offset: u64) -> ObjectResult<ListingPosition> {
    let mut look = || {
        let mut next = Vec::new();
        let mut piece = [0; 4096];
        while first_whole(&next).is_none() {
            match file.read(&mut piece)? {
                0 => break,
                bytes => next.extend_from_slice(&piece[..bytes]),
            }
        }
        file.seek(SeekFrom::Start(0))?;
        let mut all = Vec::new();
        file.read_to_end(&mut all)?;
        let here = offset_before(&all, &next);
        file.seek(SeekFrom::Start(here))?;
        Ok(position_of(&all, here))
    };
    let looked = look().map_err(KernelError::io("read process mappings"));
    if looked.is_err() {
        let _ = file.seek(SeekFrom::Start(offset));
    }
    Ok(looked?)
}

/// The first line that is there from its beginning and begins to tell of a mapping: where it
/// begins, and the address.
fn first_whole(text: &[u8]) -> Option<(usize, u64)> {
    let begins = text.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    begins.into_iter().find_map(|at| Some((at, addresses(&text[at..])?.start)))
}

/// The offset in `listing` from which on `next` is read.
fn offset_before(listing: &[u8], next: &[u8]) -> u64 {
    let all = listing.len() as u64;
    let (bytes, after) = match first_whole(next) {
        None => (next.len() as u64, all),
        Some((bytes, address)) => {
            let after = records(listing).find(|record| record.addresses.start >= address);
            (bytes as u64, after.map_or(all, |record| record.bytes.start))
        }
    };
    after.saturating_sub(bytes)
}

/// Opens it again.
pub fn restore(
    image: &ProcFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    let mut file = File::from(context.open(&image.path, flags)?);
    let offset = match image.listing {
        None => image.offset,
        Some(position) => {
            let mut text = Vec::new();
            let read = file.read_to_end(&mut text);
            read.map_err(KernelError::io("read process mappings"))?;
            offset_of(&text, position)
        }
    };
    let file = OwnedFd::from(file);
    if image.offset != 0 {
        seek(&file, offset)?;
    }
    Ok(file)
}

fn is_listing(path: &str) -> bool {
    path.starts_with("/proc/") && (path.ends_with("/maps") || path.ends_with("/smaps"))
}

/// Where `offset` lies in a listing of mappings, as the kernel writes maps and smaps (proc(5)).
fn position_of(listing: &[u8], offset: u64) -> ListingPosition {
    let end = ListingPosition { address: u64::MAX, left: 0 };
    let here = records(listing).find(|record| record.bytes.end > offset);
    here.map_or(end, |record| {
        let Record { addresses, bytes } = record;
        let left = if bytes.start < offset { bytes.end - offset } else { 0 };
        ListingPosition { address: addresses.start, left }
    })
}

/// The offset of a place in a listing. Where the mapping has become a part of a larger one, that is
/// told of.
fn offset_of(listing: &[u8], position: ListingPosition) -> u64 {
    let ListingPosition { address, left } = position;
    let here = records(listing).find(|record| record.addresses.end > address);
    here.map_or(listing.len() as u64, |record| {
        let bytes = record.bytes;
        match record.addresses.contains(&address) && left > 0 {
            true => bytes.end.saturating_sub(left).max(bytes.start),
            false => bytes.start,
        }
    })
}

/// What a listing tells of one mapping: a line, and in smaps those below.
struct Record {
    addresses: Range<u64>,
    bytes: Range<u64>,
}

fn records(listing: &[u8]) -> impl Iterator<Item = Record> {
    let mut at = 0;
    let mut lines = listing.split_inclusive(|byte| *byte == b'\n').peekable();
    std::iter::from_fn(move || {
        let first = lines.next()?;
        let start = at;
        at += first.len() as u64;
        while let Some(line) = lines.next_if(|line| addresses(line).is_none()) {
            at += line.len() as u64;
        }
        Some(Record { addresses: addresses(first).unwrap_or_default(), bytes: start..at })
    })
}

/// The mapping that a line begins to tell of, if it does.
fn addresses(line: &[u8]) -> Option<Range<u64>> {
    let head = line.split(|byte| *byte == b' ').next()?;
    let (start, end) = std::str::from_utf8(head).ok()?.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &[u8] = b"1000-2000 r--p 1 /bin/x\n2000-4000 rwxs 2 s\n8000-9000 rw-p 0\n";
    const SECOND: u64 = 24;
    const THIRD: u64 = 43;

    fn place(address: u64, left: u64) -> ListingPosition {
        ListingPosition { address, left }
    }

    #[test]
    fn a_place_in_a_listing_is_found_again() {
        for offset in 0..LINES.len() as u64 + 3 {
            let position = position_of(LINES, offset);
            assert_eq!(offset_of(LINES, position), offset.min(LINES.len() as u64));
        }
        assert_eq!(position_of(LINES, SECOND), place(0x2000, 0));
        assert_eq!(position_of(LINES, SECOND + 1), place(0x2000, THIRD - SECOND - 1));
        assert_eq!(position_of(LINES, 1000), place(u64::MAX, 0));
    }

    #[test]
    fn what_comes_next_tells_the_place_when_a_line_has_come_before() {
        for from in 1..LINES.len() as u64 {
            let next = &LINES[from as usize..];
            let more = [b"0-1000 rwxs 2 stub\n", LINES].concat();
            assert_eq!(offset_before(LINES, next), from);
            assert_eq!(offset_before(&more, next), from + 19);
        }
        assert_eq!(offset_before(LINES, b""), LINES.len() as u64);
    }

    #[test]
    fn another_listing_goes_on_at_the_same_mapping() {
        let joined = b"1000-4000 r--p 1 /bin/x\n8000-9000 rw-p 0\n";
        assert_eq!(offset_of(joined, position_of(LINES, THIRD + 4)), 24 + 4);
        assert_eq!(offset_of(joined, position_of(LINES, SECOND)), 0);
        let longer = b"0-1000 r--p 1 /bin/y\n8000-9000 rw-p 0\n";
        assert_eq!(offset_of(longer, position_of(LINES, SECOND + 4)), 21);
    }

    #[test]
    fn all_that_smaps_says_of_a_mapping_belongs_together() {
        let lines = b"2000-4000 rwxs 2 s\nSize:  4 kB\n8000-9000 rw-p 0\nSize:  1 kB\n";
        assert_eq!(position_of(lines, 20), place(0x2000, 11));
        assert_eq!(position_of(lines, 31), place(0x8000, 0));
        assert_eq!(offset_of(lines, place(0x8000, 3)), lines.len() as u64 - 3);
    }
}
