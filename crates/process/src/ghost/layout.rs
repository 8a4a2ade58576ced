//! From one layout of an address space to the next: what to unmap, map and change.

use hotspare_image::memory::{Backing, GuestRange, Mapping};

/// One change to an address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing is to be here.
    Unmap(GuestRange),
    /// This part of the new mapping with this index is to be mapped afresh.
    Map(GuestRange, usize),
    /// Only the protection differs.
    Protect(GuestRange, u8),
    /// Only flags or name differ: the range, the new mapping's index, the old flags.
    Flags(GuestRange, usize, u32),
}

/// What leads from `old` to `new`; parts of `new` inside `fresh` are mapped anew in any case.
///
/// Both lists are in address order. Unmappings come first, then the rest in address order.
pub(super) fn changes(old: &[Mapping], new: &[Mapping], fresh: &[GuestRange]) -> Vec<Change> {
    if old == new && fresh.is_empty() {
        return Vec::new();
    }
    let mut edges: Vec<u64> = old
        .iter()
        .chain(new)
        .map(|mapping| mapping.range)
        .chain(fresh.iter().copied())
        .flat_map(|range| [range.start.0, range.end.0])
        .collect();
    edges.sort_unstable();
    edges.dedup();
    let mut found = Vec::new();
    let (mut before, mut after) = (0, 0);
    for pair in edges.windows(2) {
        let piece = GuestRange::new(pair[0], pair[1]);
        let was = covering(old, &mut before, piece).map(|index| &old[index]);
        let is = covering(new, &mut after, piece);
        let anew = fresh.iter().any(|range| range.overlaps(piece));
        compare(was, is.map(|index| (index, &new[index])), anew, piece, &mut found);
    }
    let mut joined: Vec<Change> = Vec::new();
    for change in found {
        if !joined.last_mut().is_some_and(|last| join(last, &change)) {
            joined.push(change);
        }
    }
    joined.sort_by_key(|change| !matches!(change, Change::Unmap(_)));
    joined
}

fn covering(list: &[Mapping], at: &mut usize, piece: GuestRange) -> Option<usize> {
    while *at < list.len() && list[*at].range.end <= piece.start {
        *at += 1;
    }
    (*at < list.len() && list[*at].range.overlaps(piece)).then_some(*at)
}

fn compare(
    was: Option<&Mapping>,
    is: Option<(usize, &Mapping)>,
    anew: bool,
    piece: GuestRange,
    found: &mut Vec<Change>,
) {
    match (was, is) {
        (None, None) => {}
        (Some(_), None) => found.push(Change::Unmap(piece)),
        (None, Some((index, _))) => found.push(Change::Map(piece, index)),
        (Some(was), Some((index, is))) => {
            if anew || !was.is_same_memory(is) {
                found.push(Change::Map(piece, index));
                return;
            }
            if was.protection != is.protection {
                found.push(Change::Protect(piece, is.protection));
            }
            if was.flags != is.flags || was.name != is.name {
                found.push(Change::Flags(piece, index, was.flags));
            }
        }
    }
}

fn join(last: &mut Change, next: &Change) -> bool {
    match (last, next) {
        (Change::Unmap(a), Change::Unmap(b)) if a.end == b.start => a.end = b.end,
        (Change::Map(a, x), Change::Map(b, y)) if a.end == b.start && x == y => a.end = b.end,
        (Change::Protect(a, x), Change::Protect(b, y)) if a.end == b.start && x == y => {
            a.end = b.end;
        }
        (Change::Flags(a, x, p), Change::Flags(b, y, q))
            if a.end == b.start && x == y && p == q =>
        {
            a.end = b.end;
        }
        _ => return false,
    }
    true
}

/// `PROT_NONE`-free copy of what a mapping needs at mmap(2): its offset at `piece`.
pub(super) fn offset_at(mapping: &Mapping, piece: GuestRange) -> u64 {
    let into = piece.start.0 - mapping.range.start.0;
    match &mapping.backing {
        Backing::PrivateFile { offset, .. }
        | Backing::SharedFile { offset, .. }
        | Backing::SharedMemory { offset, .. } => offset + into,
        Backing::Anonymous | Backing::Special { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anonymous(start: u64, end: u64, protection: u8) -> Mapping {
        Mapping {
            range: GuestRange::new(start, end),
            protection,
            backing: Backing::Anonymous,
            flags: 0,
            protection_key: 0,
            name: None,
        }
    }

    #[test]
    fn an_unchanged_layout_needs_nothing() {
        let layout = [anonymous(0x1000, 0x3000, 3), anonymous(0x5000, 0x6000, 1)];
        assert_eq!(changes(&layout, &layout, &[]), []);
    }

    #[test]
    fn growth_maps_only_what_is_new() {
        let old = [anonymous(0x1000, 0x3000, 3)];
        let new = [anonymous(0x1000, 0x5000, 3)];
        let grown = Change::Map(GuestRange::new(0x3000, 0x5000), 0);
        assert_eq!(changes(&old, &new, &[]), [grown]);
    }

    #[test]
    fn a_hole_is_unmapped_and_a_protected_part_is_only_protected() {
        let old = [anonymous(0x1000, 0x9000, 3)];
        let new = [
            anonymous(0x1000, 0x2000, 3),
            anonymous(0x3000, 0x4000, 1),
            anonymous(0x4000, 0x9000, 3),
        ];
        let hole = Change::Unmap(GuestRange::new(0x2000, 0x3000));
        let part = Change::Protect(GuestRange::new(0x3000, 0x4000), 1);
        assert_eq!(changes(&old, &new, &[]), [hole, part]);
    }

    #[test]
    fn what_was_mapped_anew_is_mapped_anew() {
        let layout = [anonymous(0x1000, 0x5000, 3)];
        let fresh = GuestRange::new(0x2000, 0x3000);
        assert_eq!(changes(&layout, &layout, &[fresh]), [Change::Map(fresh, 0)]);
    }
}
