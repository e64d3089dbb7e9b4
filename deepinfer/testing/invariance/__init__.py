"""Invariance: prove that a request's bits depend on nothing but the request.

``check`` serves the same requests under many conditions and compares bitwise. The conditions are
the rows of the table ``AXES``; each proves that it occurred and has a fault that it must catch.
"""

from deepinfer.testing.certificate import AxisReport, Certificate, Control, NotInvariant
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.compare import Difference
from deepinfer.testing.invariance.harness import AXES, check
from deepinfer.testing.invariance.jobs import Job
from deepinfer.testing.invariance.model import ModelSubject
from deepinfer.testing.invariance.subject import REFERENCE, Setting, Subject

__all__ = ["AXES", "REFERENCE", "Axis", "AxisReport", "Bench", "Certificate", "Control",
           "Difference", "Job", "ModelSubject", "NotInvariant", "Outcome", "Setting", "Stage",
           "Subject", "Trial", "check"]
