//! timerfd_create(2).
//!
//! fdinfo shows the time that is left. The guest's clocks go on where they stood, so the rest is
//! still right when the ghost goes live, whichever clock the timer follows; except that a timer
//! on an absolute instant of the wall clock keeps the instant, not the rest.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hotspare_image::objects::TimerFd;
use hotspare_image::tree::ClockReading;
use hotspare_kernel::descriptor;

use super::error::{ObjectError, ObjectResult};
use super::fdinfo;
use super::restore::set_flags;

const NS: u64 = 1_000_000_000;

fn parse(detail: &[u8]) -> ObjectResult<TimerFd> {
    let flags = fdinfo::field(detail, "settime flags")?;
    let flags = flags.iter().try_fold(0u32, |value, byte| {
        let digit = (*byte as char).to_digit(8)?;
        value.checked_mul(8)?.checked_add(digit)
    });
    Ok(TimerFd {
        clock: fdinfo::decimal(fdinfo::field(detail, "clockid")?)? as i32,
        ticks: fdinfo::decimal(fdinfo::field(detail, "ticks")?)?,
        settime_flags: flags.unwrap_or(0),
        value_ns: pair(fdinfo::field(detail, "it_value")?)?,
        interval_ns: pair(fdinfo::field(detail, "it_interval")?)?,
    })
}

/// `(seconds, nanoseconds)` in ns.
fn pair(text: &[u8]) -> ObjectResult<u64> {
    let text = text.strip_prefix(b"(").and_then(|text| text.strip_suffix(b")")).unwrap_or(text);
    let comma = text.iter().position(|&byte| byte == b',').unwrap_or(text.len());
    let seconds = fdinfo::decimal(&text[..comma])?;
    let rest = fdinfo::decimal(text.get(comma + 1..).unwrap_or_default())?;
    Ok(seconds.saturating_mul(NS).saturating_add(rest))
}

/// Reads a timer from fdinfo; `again` reads the detail anew.
///
/// fdinfo of a periodic timer that has expired and not been read shows one tick and no rest: the
/// kernel counts the others when somebody asks through the descriptor. And a timer whose time is
/// up but whose interrupt is still to come shows neither tick nor rest, as a disarmed one does;
/// asking again gives the interrupt time to arrive.
pub fn capture(
    detail: &[u8],
    duplicate: impl Fn() -> ObjectResult<OwnedFd>,
    again: impl Fn() -> ObjectResult<Vec<u8>>,
) -> ObjectResult<TimerFd> {
    let mut timer = parse(detail)?;
    for _ in 0..3 {
        let due = timer.value_ns == 0 && (timer.interval_ns != 0 || timer.ticks == 0);
        if !due {
            break;
        }
        let file = duplicate()?;
        descriptor::settle_timerfd(file.as_fd())?;
        timer = parse(&again()?)?;
        if timer.interval_ns == 0 && timer.ticks == 0 {
            // Disarmed, in all likelihood: once more is enough.
            break;
        }
    }
    Ok(timer)
}

/// Makes it anew and starts it. `captured` are the guest's clocks at the checkpoint.
pub fn restore(image: &TimerFd, flags: u32, captured: &ClockReading) -> ObjectResult<OwnedFd> {
    let file = descriptor::timerfd(image.clock, 0)?;
    arm(image, file.as_fd(), captured)?;
    set_flags(&file, flags)?;
    Ok(file)
}

/// Starts the timer again from the image: for one that was made long before the ghost goes live.
pub fn arm(image: &TimerFd, timer: BorrowedFd<'_>, captured: &ClockReading) -> ObjectResult<()> {
    let wall = matches!(image.clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_ALARM);
    let known = (libc::TFD_TIMER_ABSTIME | libc::TFD_TIMER_CANCEL_ON_SET) as u32;
    if image.settime_flags & !known != 0 {
        let flags = image.settime_flags;
        return Err(ObjectError::Image(format!("timer flags {flags:#x}")));
    }
    let absolute = wall && image.settime_flags & libc::TFD_TIMER_ABSTIME as u32 != 0;
    let (how, value) = match absolute {
        true if image.value_ns != 0 => (image.settime_flags, captured.realtime_ns + image.value_ns),
        true | false => (0, image.value_ns),
    };
    // A periodic timer that is due but was not counted yet fires at once.
    let value = if value == 0 && image.interval_ns != 0 { 1 } else { value };
    descriptor::set_timerfd(timer, how as i32, value, image.interval_ns)?;
    if image.ticks != 0 {
        descriptor::set_timerfd_ticks(timer, image.ticks)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_fdinfo_are_understood() {
        let detail = b"clockid: 1\nticks: 3\nsettime flags: 01\nit_value: (2, 5)\n\
            it_interval: (0, 500)\n";
        let timer = parse(detail).unwrap();
        assert_eq!((timer.clock, timer.ticks, timer.settime_flags), (1, 3, 1));
        assert_eq!((timer.value_ns, timer.interval_ns), (2 * NS + 5, 500));
    }

    #[test]
    fn a_broken_line_is_an_error() {
        parse(b"clockid: 1\nticks: 3\nsettime flags: 01\nit_value: (2\nit_interval: x\n")
            .unwrap_err();
    }
}
