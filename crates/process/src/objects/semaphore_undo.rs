//! What semaphores get back when a process ends (`SEM_UNDO`, semop(2)).
//!
//! No call shows these adjustments, but semop(2) refuses an operation that would take one out of
//! its range, with `ERANGE`, and does so before it looks at the operations behind it. So each
//! process is made to try lists of operations that cannot succeed as a whole, because the last one
//! would have to wait (`EAGAIN`): which of the two errors comes tells on which side of a bound the
//! adjustment is, and nothing is changed. Two tries tell that there is none, which is the rule; two
//! rounds of some 180 find any other.

use hotspare_image::ipc::{SemaphoreSet, SemaphoreUndo};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::KernelError;
use hotspare_kernel::ipc::{SemaphoreChange, semaphore_changes};
use hotspare_kernel::remote::Call;

use super::error::ObjectResult;

/// Highest value of a semaphore and of an adjustment (`SEMVMX`, `SEMAEM`); the lowest adjustment
/// is one further from zero.
const MOST: i16 = 32_767;
const UNDO: i32 = libc::SEM_UNDO;
/// Semaphores looked at in one go, of two tries each.
const AT_ONCE: usize = 100;
/// Width of a step of the first round: about the root of [`MOST`].
const STEP: usize = 182;

/// Makes calls in a process: given the bytes they use, and the calls for the address at which
/// those will lie. Their results; `None` where the process cannot make calls now.
pub type Inside<'a> =
    &'a mut dyn FnMut(GuestPid, &[u8], &dyn Fn(u64) -> Vec<Call>) -> ObjectResult<Option<Vec<i64>>>;

/// On which side of zero an adjustment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Below,
    Above,
}

/// Operations that fail with `ERANGE` if the adjustment of semaphore `index` is on this side of
/// zero, else with `EAGAIN`. `value` is the semaphore's.
fn sign_try(index: u16, value: u16, side: Side) -> Vec<SemaphoreChange> {
    let mut changes = to_zero(index, value);
    match side {
        Side::Below => changes.extend([
            (index, MOST, UNDO),
            (index, -MOST, 0),
            (index, 1, UNDO),
            // Waits for zero.
            (index, 0, 0),
        ]),
        Side::Above => changes.extend([(index, MOST, 0), (index, -MOST, UNDO), (index, -1, 0)]),
    }
    changes
}

/// The same if the adjustment is at least as far from zero as [`bound`] says for `distance`.
fn size_try(index: u16, value: u16, side: Side, distance: i16) -> Vec<SemaphoreChange> {
    let mut changes = to_zero(index, value);
    match side {
        Side::Below => changes.extend([(index, distance, UNDO), (index, 0, 0)]),
        Side::Above => {
            changes.extend([(index, MOST, 0), (index, -distance, UNDO), (index, -MOST, 0)])
        }
    }
    changes
}

/// The adjustment for which `distance` is the least that is out of range.
fn bound(side: Side, distance: i32) -> i32 {
    match side {
        Side::Below => distance - i32::from(MOST) - 2,
        Side::Above => i32::from(MOST) + 1 - distance,
    }
}

fn to_zero(index: u16, value: u16) -> Vec<SemaphoreChange> {
    let down = -(value.min(MOST as u16) as i16);
    if down == 0 { Vec::new() } else { vec![(index, down, 0)] }
}

/// Lets `process` try each list of operations on `set`; which were out of range. `None` where the
/// process cannot be asked.
fn out_of_range(
    process: GuestPid,
    set: i32,
    tries: &[Vec<SemaphoreChange>],
    inside: Inside<'_>,
) -> ObjectResult<Option<Vec<bool>>> {
    let mut bytes = Vec::new();
    let mut places = Vec::new();
    for changes in tries {
        let mut changes = changes.clone();
        changes.iter_mut().for_each(|change| change.2 |= libc::IPC_NOWAIT);
        places.push((bytes.len() as u64, changes.len() as u64));
        bytes.extend(semaphore_changes(&changes));
    }
    let calls = |at: u64| {
        let each = places
            .iter()
            .map(|(offset, count)| Call::new(libc::SYS_semop, &[set as u64, at + offset, *count]));
        each.collect()
    };
    let Some(results) = inside(process, &bytes, &calls)? else { return Ok(None) };
    let each = results.into_iter().map(|result| match -result as i32 {
        libc::ERANGE => Ok(true),
        // Who may not change the set has nothing to undo; the set may be gone as well.
        libc::EAGAIN | libc::EACCES | libc::EIDRM | libc::EINVAL => Ok(false),
        _ => Err(KernelError::Unexpected(format!("semop that cannot succeed: {result}")).into()),
    });
    each.collect::<ObjectResult<_>>().map(Some)
}

/// Finds all adjustments of `process` in `set`; `None` where the process cannot be asked.
pub fn find(
    set: &SemaphoreSet,
    process: GuestPid,
    inside: Inside<'_>,
) -> ObjectResult<Option<Vec<SemaphoreUndo>>> {
    let mut found = Vec::new();
    let values: Vec<(u16, u16)> = (0..).zip(set.values.iter().map(|(value, _)| *value)).collect();
    for some in values.chunks(AT_ONCE) {
        let tries = some.iter().flat_map(|(index, value)| {
            [Side::Below, Side::Above].map(|side| sign_try(*index, *value, side))
        });
        let tries: Vec<_> = tries.collect();
        let Some(signs) = out_of_range(process, set.owner.id, &tries, inside)? else {
            return Ok(None);
        };
        for ((index, value), signs) in some.iter().zip(signs.chunks(2)) {
            let side = match signs {
                [true, _] => Side::Below,
                [_, true] => Side::Above,
                _ => continue,
            };
            let mut is_out = |distances: &[i16]| {
                let tries = distances.iter().map(|far| size_try(*index, *value, side, *far));
                out_of_range(process, set.owner.id, &tries.collect::<Vec<_>>(), inside)
            };
            let Some(by) = measure(side, &mut is_out)? else { return Ok(None) };
            found.push(SemaphoreUndo { process, index: *index, by });
        }
    }
    Ok(Some(found))
}

/// Which of some distances are out of range; `None` where nobody can be asked.
type IsOut<'a> = &'a mut dyn FnMut(&[i16]) -> ObjectResult<Option<Vec<bool>>>;

/// Finds the least distance that is out of range, in two rounds; the adjustment it means.
fn measure(side: Side, is_out: IsOut<'_>) -> ObjectResult<Option<i16>> {
    let coarse: Vec<i16> = (1..=MOST).step_by(STEP).collect();
    let Some(out) = is_out(&coarse)? else { return Ok(None) };
    // The last that is still in range, or nothing at all.
    let before = out.iter().position(|out| *out).unwrap_or(out.len());
    let first = before.checked_sub(1).map_or(1, |last| coarse[last]);
    let fine: Vec<i16> = (first..=MOST).take(STEP + 1).collect();
    let Some(out) = is_out(&fine)? else { return Ok(None) };
    let least = out.iter().position(|out| *out).map_or(i32::from(MOST) + 1, |at| fine[at].into());
    Ok(Some(bound(side, least) as i16))
}

/// Operations that give `process`'s adjustment its value and leave the semaphore at `value`.
pub fn restoring(undo: &SemaphoreUndo, value: u16) -> Vec<SemaphoreChange> {
    let index = undo.index;
    let mut changes = to_zero(index, value);
    let mut rest = i32::from(undo.by);
    while rest != 0 {
        let part = rest.clamp(-i32::from(MOST), MOST.into()) as i16;
        // What is taken with SEM_UNDO is added to the adjustment, and the other way round.
        match part > 0 {
            true => changes.extend([(index, part, 0), (index, -part, UNDO)]),
            false => changes.extend([(index, -part, UNDO), (index, part, 0)]),
        }
        rest -= i32::from(part);
    }
    let up = value.min(MOST as u16) as i16;
    if up != 0 {
        changes.push((index, up, 0));
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What semop(2) does with the operations; the kernel's rules.
    fn semop(adjustment: &mut i32, value: &mut i32, changes: &[SemaphoreChange]) -> i32 {
        let before = (*adjustment, *value);
        for (_, by, flags) in changes {
            let by = i32::from(*by);
            let undo = if flags & UNDO != 0 { *adjustment - by } else { *adjustment };
            let in_range = *value + by <= 32_767 && (-32_768..=32_767).contains(&undo);
            let error = if by == 0 && *value != 0 || *value + by < 0 {
                libc::EAGAIN
            } else if !in_range {
                libc::ERANGE
            } else {
                (*adjustment, *value) = (undo, *value + by);
                continue;
            };
            (*adjustment, *value) = before;
            return error;
        }
        0
    }

    #[test]
    fn every_adjustment_is_found_and_made_again() {
        let wanted = [-32_768, -32_767, -17, -2, -1, 1, 2, 181, 182, 183, 30_000, 32_767];
        for (adjustment, value) in wanted.iter().flat_map(|a| [0, 1, 9, 32_767].map(|v| (*a, v))) {
            let mut kept = (adjustment, i32::from(value));
            let mut answer = |changes: &[SemaphoreChange]| {
                let error = semop(&mut kept.0, &mut kept.1, changes);
                assert_ne!(error, 0, "nothing may succeed: {changes:?}");
                error == libc::ERANGE
            };
            let below = answer(&sign_try(3, value, Side::Below));
            assert_eq!((below, adjustment < 0), (adjustment < 0, below));
            assert_eq!(answer(&sign_try(3, value, Side::Above)), adjustment > 0);
            let side = if below { Side::Below } else { Side::Above };
            let mut is_out = |distances: &[i16]| {
                assert!(distances.len() < hotspare_kernel::remote::CALLS_MAX);
                let each = distances.iter().map(|far| answer(&size_try(3, value, side, *far)));
                Ok(Some(each.collect()))
            };
            let by = measure(side, &mut is_out).unwrap().unwrap();
            assert_eq!(i32::from(by), adjustment, "value {value}");
            let undo = SemaphoreUndo { index: 3, by, ..SemaphoreUndo::default() };
            let mut made = (0, i32::from(value));
            assert_eq!(semop(&mut made.0, &mut made.1, &restoring(&undo, value)), 0);
            assert_eq!(made, (adjustment, i32::from(value)));
        }
    }

    #[test]
    fn no_adjustment_is_on_neither_side() {
        for value in [0, 5, 32_767] {
            for side in [Side::Below, Side::Above] {
                let (mut adjustment, mut kept) = (0, i32::from(value));
                let error = semop(&mut adjustment, &mut kept, &sign_try(0, value, side));
                assert_eq!(error, libc::EAGAIN);
            }
        }
    }
}
