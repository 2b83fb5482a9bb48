/* A matrix into an rvq blob so that its products are near, rather than its weights: sub-vector by
 * sub-vector, each with what the errors before it leave to make up for. */
#ifndef ENCODE_RVQ_FEEDBACK_H
#define ENCODE_RVQ_FEEDBACK_H

#include "encode/moments.h"
#include "encode/rvq_encode.h"

/* As rvq_encode; moments as moments_factor wrote them for `cols` inputs. */
hr_status rvq_encode_feedback(const struct rvq_encode *e, const float *w, uint32_t rows,
                              uint32_t cols, const float *moments, void *blob, hr_error *err);

#endif
